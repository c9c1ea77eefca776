"""`coserve bench upkeep`: the longest acceptance while the database is copied, checked, pruned and shrunk."""

import multiprocessing
import sqlite3
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.units import size_text
from tests.bench.tables import print_narrow
from tools.terminal.console import AsJson, console, errors, fail, print_json

if TYPE_CHECKING:
    from tests.bench.upkeep_line import BenchLine

#: The promise: upkeep blocks intake for no longer.
_MAX_WAIT_MS = 1000.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of upkeep: its length, and the waits of images that came meanwhile."""

    upkeep: str
    seconds: float
    images: int
    p50_ms: float
    p99_ms: float
    longest_ms: float
    note: str = ""


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command("upkeep")(bench_upkeep)


def bench_upkeep(
    rows: Annotated[int, typer.Option(min=1000, help="Inspections in the database.")] = 1_000_000,
    rate: Annotated[float, typer.Option(min=1.0, help="Images a second that come in meanwhile.")] = 100.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long nothing happens, and a reader stays.")] = 10.0,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="FOLDER", help="On the disk to measure; temporary files go there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Keep accepting while a database of many results is looked after; status 1 if an image waited over a second.

    Example: coserve bench upkeep --rows 20000
    """
    if folder is not None and not folder.is_dir():
        fail(f"no folder {folder}", status=2)
    from tests.bench.upkeep_line import BenchLine, make_database

    with tempfile.TemporaryDirectory(prefix="coserve-upkeep-", dir=folder) as scratch:
        began_s = time.monotonic()
        make_database(Path(scratch), rows, files=min(rows // 10, 50_000))
        size_bytes = (Path(scratch) / "inspection.db").stat().st_size
        if not as_json:
            console.print(
                f"{rows:,} inspections, {size_text(size_bytes)}, made in {time.monotonic() - began_s:.0f} s;"
                f" {rate:g} images of 20 KB a second come in\n"
            )
        line = BenchLine(Path(scratch), rate, 20_000)
        line.start()
        try:
            measured = _measure(line, seconds)
        finally:
            line.stop()
    if as_json:
        print_json({"rows": rows, "database_bytes": size_bytes, "upkeep": [asdict(row) for row in measured]})
    else:
        columns = ("upkeep", "seconds", "images", "p50 ms", "p99 ms", "longest ms", "")
        print_narrow("Waits for `accepted`", columns, [tuple(asdict(row).values()) for row in measured])
    raise SystemExit(1 if any(row.longest_ms > _MAX_WAIT_MS for row in measured) else 0)


def _measure(line: "BenchLine", for_s: float) -> list[Row]:
    import numpy as np

    rows: list[Row] = []

    def measure(name: str, carry_out: Callable[[], str | None]) -> None:
        time.sleep(0.5)
        line.take_waits_ms()
        errors.print(f"{name} …", markup=False)
        began_s = time.monotonic()
        note = carry_out() or ""
        seconds = time.monotonic() - began_s
        time.sleep(0.5)
        while not (waits_ms := line.take_waits_ms()):  # all are held up: the wait that ends it says for how long
            time.sleep(0.01)
        p50_ms, p99_ms, longest_ms = (round(float(each), 1) for each in np.quantile(waits_ms, (0.5, 0.99, 1.0)))
        rows.append(Row(name, round(seconds, 1), len(waits_ms), p50_ms, p99_ms, longest_ms, note))

    # Commands are processes of their own, as on a line.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process, line.retention():
        process.submit(_warm_up).result()
        measure("nothing", lambda: time.sleep(for_s))
        measure("backup", lambda: process.submit(_backup, line.folder).result())
        measure("check", lambda: process.submit(_check, line.folder).result())
        measure(f"a reader that stays for {for_s:g} s", lambda: _long_reader(line, for_s))
        measure("checkpoint of that log", lambda: _until_log_begins_anew(line, for_s))
    with line.retention(images_bytes="1B") as thread:
        measure("pruning images", lambda: _round(thread, "images"))
    with line.retention(results_for="2y") as thread:
        measure("pruning half of the results", lambda: _round(thread, "inspections"))
        measure("vacuum", lambda: _until_shrunk(line))
    return rows


def _warm_up() -> None:
    """Import what is measured later."""
    import daemon.storage.database.upkeep  # noqa: F401


def _backup(folder: Path) -> str:
    from daemon.storage.database.upkeep import copy_database

    copy_database(folder / "inspection.db", folder / "copy.db")
    return size_text((folder / "copy.db").stat().st_size)


def _check(folder: Path) -> str:
    from daemon.storage.database.upkeep import check_database

    # The newest image may be in the tables only: its file is the journal's segment.
    problems = check_database(f"sqlite:///{folder}/inspection.db", folder / "images", folder / "journal")
    return problems[0] if problems else "all well"


def _long_reader(line: "BenchLine", for_s: float) -> str:
    with closing(sqlite3.connect(line.folder / "inspection.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM boards").fetchone()
        time.sleep(for_s)
        return f"log {size_text(line.log_bytes())}"


def _until_log_begins_anew(line: "BenchLine", for_s: float) -> str:
    time.sleep(for_s / 2)
    return f"log {size_text(line.log_bytes())}"


def _round(thread: Any, what: str) -> str:
    thread.prune(begin=True)
    while thread.prune(begin=False)["pruning"]:
        time.sleep(_POLL_S)
    return f"{thread.prune(begin=False)[what]:,} {what}"


def _until_shrunk(line: "BenchLine") -> str:
    from daemon.storage.database.upkeep import Checkpoints

    database = line.folder / "inspection.db"
    before = database.stat().st_size
    with closing(Checkpoints(line.url)) as looking:
        while looking.vacuum_is_due():
            time.sleep(_POLL_S)
    time.sleep(2.0)  # the file shrinks at a checkpoint
    return f"{size_text(before)} to {size_text(database.stat().st_size)}"
