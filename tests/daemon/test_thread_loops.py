"""A defect in one piece of a thread's work costs this piece: the thread goes on, and says what it was."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

from daemon.host.worker import Worker
from daemon.wire.control import ask
from tests.contract.client import Line
from tests.daemon.host.manager import Manager, a_holdable_daemon
from tests.waiting import until


def test_a_worker_carries_out_what_follows_an_order_that_failed() -> None:
    done = threading.Event()

    def carry_out(divisor: int) -> None:
        if 1 / divisor:
            done.set()

    worker: Worker[int] = Worker("test", carry_out)
    worker.start()
    worker.put(0)
    worker.put(1)
    assert done.wait(60.0)
    assert worker.stop(60.0)


def test_copies_are_made_and_the_disk_is_watched_after_a_defect_of_either(tmp_path: Path, experts_folder: Path) -> None:
    line, log = Line(tmp_path, experts_folder, retention={"keep": ["pass"]}), tmp_path / "daemon.log"
    control = f"ipc://{tmp_path}/run/control.sock"

    def copies() -> int:
        with closing(sqlite3.connect(tmp_path / "inspection.db")) as database:
            return database.execute("SELECT count(image_path) FROM inspections").fetchone()[0]

    with Manager(tmp_path) as manager, a_holdable_daemon(line.config, manager, 5.0):
        manager.until("READY", "1")
        for name in ("keeper", "room"):
            (tmp_path / f"{name}.defect").touch()
        line.result(line.send(component="P"))
        until(lambda: all(f"a defect of {name}" in log.read_text() for name in ("keeper", "room")), log.read_text)
        for name in ("keeper", "room"):
            (tmp_path / f"{name}.defect").unlink()
        until(lambda: copies() == 1, log.read_text)
        ask(control, "prune", timeout_s=60.0)
        until(lambda: not ask(control, "prune", timeout_s=60.0, begin=False)["pruning"], log.read_text)
