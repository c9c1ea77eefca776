"""The pictures of a package: copied and compared with what the camera sent, or why they are not there."""

import csv
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from daemon.config.settings import Config
from daemon.storage.raw_pixels import as_sent
from daemon.units import spreadsheet_cell
from tools.query.package.chosen import Taken

LIST = "pictures.csv"
_LIST_COLUMNS = ("inspection_id", "serial", "designator", "verdict", "file", "why_not")
_LONGEST_NAME = 60


@dataclass(slots=True)
class Pictures:
    """How many there are, and why others are not there."""

    copied: int
    bytes: int
    missing: dict[str, int]
    damaged: list[int]


def copy_pictures(settings: Config, taken: Taken, rows: Path, package: Path) -> Pictures:
    """Copy what is kept into `package/pictures`, and list every image in `pictures.csv`.

    No transaction is open meanwhile: what retention deletes under our hands is listed as such.
    """
    done = Pictures(0, 0, {}, [])
    serials = {row["board_id"]: row["serial"] for row in _lines(rows / "boards.jsonl")}
    with (package / LIST).open("w", encoding="utf-8", newline="") as file:
        listed = csv.writer(file, lineterminator="\n")
        listed.writerow(_LIST_COLUMNS)
        for row in _lines(rows / "inspections.jsonl"):
            serial = serials[row["board_id"]]
            target = _name(row, serial)
            why_not = _copy(settings, taken, row, package / target, done)
            if why_not is not None:
                done.missing[why_not] = done.missing.get(why_not, 0) + 1
            cells = (
                row["inspection_id"],
                serial,
                row["designator"],
                row["verdict"],
                "" if why_not else target,
                why_not,
            )
            listed.writerow([spreadsheet_cell(value) for value in cells])
    return done


def _copy(settings: Config, taken: Taken, row: dict[str, Any], target: Path, done: Pictures) -> str | None:
    """Copy one picture; why there is none."""
    number = row["inspection_id"]
    if row["image_path"] is None:
        return _why_not_kept(settings, taken, row)
    try:
        data = (settings.images.parent / row["image_path"]).read_bytes()
    except FileNotFoundError:
        return "deleted since its row was read, or by hand"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    done.copied += 1
    done.bytes += len(data)
    if not _is_as_sent(data, target.suffix, row["image_sha256"]):
        done.damaged.append(number)
    return None


def _is_as_sent(data: bytes, suffix: str, sha256: str) -> bool:
    try:
        payload, _ = as_sent(data, suffix)
    except ValueError:
        return False
    return hashlib.sha256(payload).hexdigest() == sha256


def _why_not_kept(settings: Config, taken: Taken, row: dict[str, Any]) -> str:
    task = taken.waiting.get(row["inspection_id"])
    if task is not None:
        return "not judged yet" if task == "judge" else "its copy was not made yet: export again"
    if row["verdict"] not in settings.retention.keep:
        return f"verdict {row['verdict']}: not kept (retention.keep)"
    return "pruned by retention (images_for, images_bytes, free), or lost"


def _name(row: dict[str, Any], serial: str) -> str:
    """A path that every system takes, whatever serial and designator say; the numbers make it the only one."""
    suffix = Path(row["image_path"]).suffix if row["image_path"] else ""
    return f"pictures/{row['board_id']}-{_safe(serial)}/{row['inspection_id']}-{_safe(row['designator'])}{suffix}"


def _safe(text: str) -> str:
    """Letters, digits, dot, dash and underline stay; the rest is percent-encoded, and a long one cut."""
    return quote(text, safe="").replace("~", "%7E").replace("%", "_")[:_LONGEST_NAME]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
