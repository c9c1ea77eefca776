"""Texts and names that people bring, whatever program wrote them."""

from pathlib import Path

import pytest

from tools.camera.station import listed_serials
from tools.terminal.console import CommandError
from tools.terminal.names import file_name, legal_name

LINES = "SN-1001\r\n\r\nPrüf-2\r\n"


@pytest.mark.promise("Cameras", "A list of serials may be UTF-8, or UTF-16 with its byte-order mark")
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_list_of_serials_is_read_as_notepad_and_excel_write_it(tmp_path: Path, encoding: str) -> None:
    (file := tmp_path / "serials.txt").write_bytes(LINES.encode(encoding))
    assert list(listed_serials(file)) == ["SN-1001", "Prüf-2"]
    file.write_bytes(b"\xfe\xff" + LINES.encode("utf-16-be"))
    assert list(listed_serials(file)) == ["SN-1001", "Prüf-2"]


def test_another_encoding_is_read_only_if_it_is_named(tmp_path: Path) -> None:
    for encoding, serial in (("windows-1252", "Prüf-2"), ("utf-16-le", "P-2"), ("utf-16-be", "P-2")):
        (file := tmp_path / "serials.txt").write_bytes(LINES.replace("Prüf-2", serial).encode(encoding))
        with pytest.raises(CommandError, match=r"txt:[13]: is not UTF-8 text: save it as UTF-8 \(serials: or name"):
            listed_serials(file)
        assert list(listed_serials(file, encoding)) == ["SN-1001", serial]


@pytest.mark.parametrize("serial", ["A\u200bB", "A\x01B", "x" * 129, "\u202eA"])
def test_a_wrong_serial_is_refused_by_its_line_and_moves_none_to_another_board(tmp_path: Path, serial: str) -> None:
    (file := tmp_path / "serials.txt").write_text(f"S1\n{serial}\nS3\n", encoding="utf-8")
    with pytest.raises(CommandError, match=r"serials\.txt:2: .* is not a string of 1 to 128"):
        listed_serials(file)


def test_names_of_a_mac_are_those_of_others() -> None:
    assert legal_name(" Pru\u0308f ", "x") == "Prüf"
    assert file_name("Pru\u0308f") == file_name("Prüf") == "Prüf"
    with pytest.raises(CommandError, match=r"its name: 'Geh\\udce4use' is not UTF-8"):
        legal_name(b"Geh\xe4use".decode(errors="surrogateescape"), "its name")


def test_no_two_names_have_one_file_name() -> None:
    long = "部" * 60
    names = ["电阻", "电容", "a/b", "a\\b", "a_b", ".a", "a", "..", ".", "/", f"{long}1", f"{long}2", "\udc80", ""]
    made = [file_name(name) for name in names]
    assert made[:2] == names[:2]
    assert len(set(made)) == len(names)
    assert all(0 < len(name.encode()) <= 120 and "/" not in name and not name.startswith(".") for name in made)
