"""Sizes as people read them, and cells of a CSV file that no spreadsheet runs."""

import csv
import io

import pytest

from daemon.units import printable, size_text, spreadsheet_cell


@pytest.mark.parametrize(
    ("size_bytes", "said"),
    [
        (0, "0 B"),
        (812, "812 B"),
        (999.6, "1 kB"),
        (45_400, "45 kB"),
        (999_600, "1.0 MB"),
        (44_800_000, "44.8 MB"),
        (99_960_000, "100 MB"),
        (209_900_000, "210 MB"),
        (999_700_000, "1.0 GB"),
        (2 * 10**9, "2.0 GB"),
        (7_681 * 10**9, "7.7 TB"),
        (1_250 * 10**12, "1,250.0 TB"),
    ],
)
def test_a_size_has_three_digits_and_never_a_thousand_of_a_unit(size_bytes: float, said: str) -> None:
    assert size_text(size_bytes) == said


@pytest.mark.parametrize("delimiter", [",", ";"])
@pytest.mark.parametrize(
    "before",
    ["", " ", "\t", "\r", "\n", "\r\n", "x;", "x; ", "x;y\n", ";;", "'", "\u200b", "\ufeff", "x;\u2060 \u200d", "\x01"],
)
@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20"])
def test_no_spreadsheet_runs_a_cell(sign: str, before: str, delimiter: str) -> None:
    text = io.StringIO()
    csv.writer(text).writerow(["1", spreadsheet_cell(f"{before}{sign}cmd|' /C calc'!A0;y"), "2"])
    lines = [text.getvalue()] if delimiter == "," else text.getvalue().splitlines()
    for row in csv.reader(lines, delimiter=delimiter):
        for cell in row:
            assert not cell.lstrip(" ").startswith((sign, "\t", "\r")), cell
            assert not cell.strip().startswith(sign), cell
            assert not cell.lstrip(" \u200b\ufeff\u2060\u200d\x01").startswith(sign), cell


def test_what_is_not_seen_is_shown_as_an_escape() -> None:
    assert printable("A\u3164\u2800\xa0\u202e\x1b電阻 ⚠\ufe0f") == r"A\u3164\u2800\xa0\u202e\x1b電阻 ⚠" + "\ufe0f"


@pytest.mark.parametrize("value", [None, 1, -1.5, "", "R0402", "a-b", "a=b", "1+1", "x;y", "x\ny", "a@b"])
def test_a_cell_that_nothing_would_run_is_itself(value: object) -> None:
    assert spreadsheet_cell(value) == value
