"""Signed packages: by whom, whether anything was changed since, in one sentence each; also without CoServe."""

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client import Line
from tests.sql import sql
from tests.tools.query.test_export import forge
from tests.tools.run_commands import coserve


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("quality", "other"):
        coserve("keys", "new", name, "--sign", "--dir", folder)
    coserve("keys", "new", "camera", "--dir", folder)
    return folder


@pytest.fixture(scope="module")
def signed(judged: Line, keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("signed") / "L2"
    coserve("export", "--lot", "L2", "--out", out, "--sign", keys / "quality.sign_secret", "--config", judged.config)
    return out


@pytest.fixture
def copy(signed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(signed, tmp_path / "package"))


def verify(package: Path, *words: object, status: int = 0) -> str:
    done = coserve("export", "--verify", package, *words, status=status)
    return done.stdout + done.stderr


def test_a_signed_package_says_by_whom_when_and_on_which_line(signed: Path, keys: Path, judged: Line) -> None:
    assert "not checked: add --key" in verify(signed)
    words = verify(signed, "--key", keys / "quality.sign")
    manifest = json.loads((signed / "manifest.json").read_text())
    signer = manifest["signed_by"]
    assert f"signed by {signer['user']} with the key {signer['key']}: the signature is valid" in words
    ((epoch,),) = judged.rows("SELECT epoch FROM stream_position")
    assert manifest["line"]["epoch"] == epoch is not None
    assert manifest["line"]["name"]
    check = json.loads(coserve("export", "--verify", signed, "--key", keys / "quality.sign", "--json").stdout)
    assert (check["is_signature_valid"], check["is_whole"]) == (True, True)
    assert check["files"] == sum(path.is_file() for path in signed.rglob("*"))


@pytest.mark.promise(
    "A full disk, and years of results",
    "A signed package shows any later change of its rows, in it or in the database ([drill](results.md#an-audit))",
)
@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        (lambda p: None, "other.sign", "it was signed with another key"),
        (lambda p: (p / "SIGNATURE").unlink(), "quality.sign", "it is not signed: it has no SIGNATURE"),
        (lambda p: (p / "SIGNATURE").write_text("AAAA\n"), "quality.sign", "SIGNATURE is cut off or changed"),
        (lambda p: (p / "SIGNATURE").write_text(base64.b64encode(bytes(64)).decode()), "quality.sign",
         "SHA256SUMS or SIGNATURE was changed after signing"),
        (lambda p: forge(p, "README.txt", b"other words"), "quality.sign",
         "SHA256SUMS or SIGNATURE was changed after signing"),
        (lambda p: (p / "rows/boards.jsonl").write_text("board_id"), "quality.sign", "changed: rows/boards.jsonl"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_signature_is_named(
    copy: Path, keys: Path, change: Callable[[Path], Any], key: str, message: str
) -> None:
    change(copy)
    assert message in verify(copy, "--key", keys / key, status=1)


def test_a_key_that_cannot_sign_writes_no_package(judged: Line, keys: Path, tmp_path: Path) -> None:
    for name, message in (
        ("quality.sign", "is not a secret Ed25519 key"),
        ("camera.key_secret", "is not a secret Ed25519 key"),
        ("open.sign_secret", "can be read by everybody: chmod 600 it"),
        ("absent", "No such file"),
    ):
        if name.startswith("open"):
            shutil.copy(keys / "quality.sign_secret", tmp_path / name).chmod(0o644)
        key = next(folder / name for folder in (tmp_path, keys) if (folder / name).exists() or folder == keys)
        words = ("--lot", "L2", "--out", tmp_path / "out", "--sign", key, "--config", judged.config)
        done = coserve("export", *words, status=1)
        assert message in done.stderr
        assert list(tmp_path.glob("out*")) == []
    wrong = coserve("export", "--key", keys / "quality.sign", "--config", judged.config, status=2)
    assert "name it with --verify DIR" in wrong.stderr


def test_the_readme_of_the_package_shows_how_to_check_it_without_coserve(
    signed: Path, keys: Path, tmp_path: Path
) -> None:
    readme = (signed / "README.txt").read_text(encoding="utf-8")
    place = tmp_path / "check"
    shutil.copytree(signed, place)
    shutil.copy(keys / "quality.sign", place / "NAME.sign")
    indented = [row.strip() for row in readme.splitlines() if row.startswith("    ")]
    shell = [
        row.partition("    ")[0].replace("/tmp/signature", f"{tmp_path}/signature")  # noqa: S108
        for row in indented
        if row.startswith(("base64", "openssl", "sha256sum -c"))
    ]
    assert len(shell) == 4
    begin = indented.index("import base64, pathlib")
    python = "\n".join(indented[begin : begin + 5])

    def check() -> list[int]:
        both = (["sh", "-ec", "\n".join(shell)], [sys.executable, "-c", python])
        return [subprocess.run(command, cwd=place, capture_output=True, check=False).returncode for command in both]

    assert check() == [0, 0]
    forge(place, "README.txt", b"other words")
    assert 0 not in check()


LATER = "2999-01-01T00:00:00.000Z"
ADDED = "INSERT INTO reviews (inspection_id, at, reviewer, verdict, seq) VALUES ({{id}}, '{}', 'Eva', 'pass', {})"
ATTEMPT = (
    "INSERT INTO boards (board_type, serial, attempt, lot, first_seen_at, completed_at, expected, verdict,"
    " rules_version, edition, seq) SELECT board_type, serial, 99, lot, '{at}', '{at}', 1, 'pass', rules_version,"
    " edition, {seq} FROM boards WHERE lot = 'L2' LIMIT 1"
)


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        ("UPDATE stages SET confidence = confidence + 1e-9", "stages {id} 0: confidence is"),
        ("UPDATE inspections SET defect = 'D7' WHERE inspection_id = {id}", "inspections {id}: defect is D7"),
        ("UPDATE boards SET lot = 'L9'", "lot is L9 in the database, L2 in the package"),
        ("UPDATE changes SET who = 'nobody' WHERE change_id = 1", "changes 1: who is nobody"),
        ("DELETE FROM detections", "not in the database any more"),
        ("UPDATE inspections SET image_path = NULL", None),
        ("UPDATE runs SET ended_at = '2027' WHERE ended_at IS NULL", None),
        (ADDED.format(LATER, 10**6), None),
        (ADDED.format("2026-01-01", 10**6), "with the time 2026-01-01, before the package"),
        (ADDED.format(LATER, 0), "with the seq 0, given out before the package was made"),
        (ADDED.format(LATER, "NULL"), "without a seq, which each verdict gets"),
        (ADDED.format("", 10**6), "with the time , before the package was made"),
        (ADDED.format("31.12.2025 09:00", 10**6), "with the time 31.12.2025 09:00, before"),
        ("UPDATE recipes SET time_limit_s = 1", "time_limit_s is 1.0 in the database"),
        ("UPDATE editions SET who = 'nobody'", "who is nobody in the database"),
        ("UPDATE editions SET ended_at = '2027'", None),
        ("INSERT INTO detections VALUES (9999, {id}, 0, 'void', 0.9, 1, 1, 2, 2)", "detections 9999: added to the"),
        ("UPDATE boards SET attributes = '9'", "attributes is 9 in the database, None in the package"),
        (ATTEMPT.format(at="2026-01-01", seq=10**6), "with the time 2026-01-01, before the package"),
        (ATTEMPT.format(at=LATER, seq=10**6), None),
        (ATTEMPT.format(at=LATER, seq="NULL"), "added to the database since, without a seq"),
    ],
)  # fmt: skip
def test_rows_that_were_changed_after_signing_are_named_and_later_ones_are_not(
    line: Path, signed: Path, keys: Path, harm: str, named: str | None
) -> None:
    first = json.loads((signed / "rows/stages.jsonl").read_text().splitlines()[0])["inspection_id"]
    sql(line, harm.format(id=first))
    words = verify(
        signed, "--key", keys / "quality.sign", "--compare", "--config", line / "coserve.yaml", status=int(bool(named))
    )
    assert ("its database has the same rows" in words) is (named is None)
    assert named is None or named.format(id=first) in words
    assert words.rstrip().endswith("NOT WHOLE") is (named is not None)
    assert "the signature is valid" in words
