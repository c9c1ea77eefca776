"""A line that is broken again and again, with publishers and a consumer that go on through all of it.

An episode is one line in a folder of its own: rounds of breaking it, then a last, unharmed run that must finish all
work, and after each round the question whether every promise is kept (faults_invariants.py).
"""

import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tests.contract.client import Line
from tests.faults.faults_cameras import RULES, Consumer, Sent, Shift
from tests.faults.faults_invariants import broken_promises
from tests.faults.powercut import Disk, Unsynced
from tests.faults.shim import Call, read_log, shim_environment, switch_faults
from tests.lines import COSERVE_RUN, a_line
from tests.waiting import PATIENCE_S, until
from tools.setup.service import READY
from tools.terminal.console import quiet_start

#: Files that a power cut does not touch: weights and rules were there long before, and sockets.
LEFT_ALONE = ("experts/", "rules.yaml", "coserve.yaml", "run/")
#: Without these calls no image can be accepted. The others may be refused without a loss.
NEEDED = (
    *("sync@.journal", "write@.journal$:e", "open@.journal", "sync@/journal$"),
    *("sync@/inspection.db-wal", "write@/inspection.db-wal$:e"),
)


@dataclass(slots=True)
class Tally:
    """Counts of one line: its rounds, how they ended, the faults that were injected, images, and broken promises."""

    rounds: int = 0
    ends: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])
    images_accepted: int = 0
    results_published: int = 0
    messages_resent: int = 0
    promises_broken: list[str] = field(default_factory=list[str])


class Run:
    """One daemon process under the shim. `kill_after_s` counts from its birth: the start is a moment like others."""

    def __init__(self, line: "FaultLine", plan: Sequence[str], number: int) -> None:
        self.line = line
        self.log = line.scratch / f"calls-{number:04d}"
        self.switch = line.scratch / f"switch-{number:04d}"
        self.disk = Disk(line.folder, LEFT_ALONE)
        environ = shim_environment(plan, self.log, switch=self.switch, keep_bytes_of=line.folder)
        with line.daemon_log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *line.command, str(line.config)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=quiet_start(environ),
            )
        self.ready = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for output in self.process.stdout:
            if output.startswith(READY):
                self.ready.set()
        self.process.stdout.close()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait_ready(self) -> None:
        """Wait until the daemon says that it is ready, or has ended."""
        until_s = time.monotonic() + PATIENCE_S
        while not self.ready.wait(0.02) and not self.ended:
            assert time.monotonic() < until_s, f"the daemon is not ready: {self.line.log_end()}"

    def wait_end(self, timeout_s: float) -> bool:
        """Return True if it ended by itself, at a point of its plan, within `timeout_s`."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self.process.kill()
        self.join()

    def stop(self) -> None:
        """SIGTERM; it must end in order."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0, self.line.log_end()
        self.join()

    def join(self) -> None:
        self.process.wait(PATIENCE_S)
        self._listener.join(5.0)

    def calls(self) -> list[Call]:
        return read_log(self.log)

    def cut_power(self, unsynced: Unsynced, rng: random.Random) -> None:
        """Reduce the files of the ended process to those that a power cut at that moment would have left."""
        self.disk.replay(self.calls(), self.log)
        self.disk.cut(unsynced, rng)

    def forget(self) -> None:
        """Delete the kept bytes of a round that was checked."""
        for path in self.line.scratch.glob(f"{self.log.name}*"):
            path.unlink()


class FaultLine:
    """A line in `folder`, its cameras and its consumer (none outlives the block), and what happened to it."""

    def __init__(
        self, folder: Path, experts: Path, seed: int, cameras: int = 2, command: Sequence[str] = COSERVE_RUN
    ) -> None:
        self.command = command
        self.folder = folder / "line"
        self.scratch = folder / "calls"
        self.scratch.mkdir(parents=True)
        self.daemon_log = folder / "daemon.log"
        limits = {"credit": 16, "backlog_bytes": "3200KB", "source_share": 1}  # journal files of 100 KB
        self.config = a_line(self.folder, experts, limits=limits)
        (self.folder / "rules.yaml").write_text(RULES, encoding="utf-8")
        self.line = Line.at(self.config)
        self.rng = random.Random(f"{folder.name} {seed}")
        self.tally = Tally()
        self._last_run: Run | None = None
        self.shifts = [Shift(self.line.intake, f"cam-{n}", seed) for n in range(1, cameras + 1)]
        self.consumer = Consumer(self.line.results)
        for thread in (*self.shifts, self.consumer):
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._last_run is not None:
            self._last_run.kill()
        for shift in self.shifts:
            shift.end()
        self.consumer.end()

    def run(self, *plan: str) -> Run:
        self.tally.rounds += 1
        self._last_run = Run(self, plan, self.tally.rounds)
        return self._last_run

    def log_end(self, lines: int = 5) -> str:
        """Return the last lines of the daemon's log."""
        text = self.daemon_log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(line[:400] for line in text.splitlines()[-lines:])

    @property
    def taken(self) -> dict[tuple[str, str], Sent]:
        """A copy of the images that were taken, by source and id; cameras go on."""
        return {
            (s.camera.source, image_id): sent for s in self.shifts for image_id, sent in list(s.camera.taken.items())
        }

    def check_promises(self, what: str, *, idle: bool = False) -> None:
        """Note every promise that is broken now; the daemon has ended."""
        # The account before the files: what is answered in between is in the files already.
        taken, messages = self.taken, dict(self.consumer.messages)
        broken = broken_promises(self.folder, taken, messages, idle=idle)
        for source in (*(shift.camera for shift in self.shifts), self.consumer):
            broken += source.complaints
            source.complaints = []
        self.tally.promises_broken += [f"{what}: {problem}" for problem in broken[:20]]

    def end_of(self, run: Run, how: str, unsynced: Unsynced | None = None) -> None:
        """Account for a run that ended: cut the power if asked to, count, check the promises, delete its log."""
        run.join()
        if unsynced is not None:
            run.cut_power(unsynced, self.rng)
            how = f"{how}, power cut ({unsynced} unsynced)"
        self.tally.ends[how] += 1
        self.tally.faults.update(f"{call.call} {call.action}" for call in run.calls() if call.action != "-")
        self.check_promises(f"round {self.tally.rounds} ({how})")
        if not self.tally.promises_broken:
            run.forget()

    def finish(self) -> Tally:
        """Carry out a last run without faults until all images are answered and judged; then check every promise."""
        run = self.run()
        run.wait_ready()
        assert not run.ended, self.log_end()
        for shift in self.shifts:
            shift.end()
        for shift in self.shifts:
            shift.join(PATIENCE_S)
            assert not shift.is_alive(), f"{shift.camera.outstanding} images have no answer: {self.log_end()}"
            if shift.error is not None:
                raise shift.error
        until(lambda: self.line.status()["backlog"] == 0, self.log_end)
        stream = {message["seq"]: message for message in self.line.stream()}
        if sorted(stream) != list(range(1, len(stream) + 1)):
            self.tally.promises_broken.append(
                f"the stream has gaps: {len(stream)} messages up to seq {max(stream, default=0)}"
            )
        for seq, message in list(self.consumer.messages.items()):
            # A board may close meanwhile; what was heard later is held against the rows below.
            if seq <= len(stream) and stream.get(seq) != message:
                self.tally.promises_broken.append(f"seq {seq} was published as {message} and is now {stream.get(seq)}")
        run.stop()
        self.consumer.end()
        self.tally.ends["stopped"] += 1
        self.check_promises("the end", idle=True)
        cameras = [shift.camera for shift in self.shifts]
        self.tally.images_accepted = sum(len(camera.taken) for camera in cameras)
        self.tally.results_published = len(stream)
        self.tally.messages_resent = sum(camera.account.resent for camera in cameras)
        return self.tally

    @property
    def busy_answers(self) -> int:
        return sum(shift.camera.account.busy for shift in self.shifts)

    def taken_more(self, images: int = 1) -> Callable[[], bool]:
        """Return a condition: `images` more than now have been taken."""
        goal = len(self.taken) + images
        return lambda: len(self.taken) >= goal


def kill_at_random(line: FaultLine, longest_s: float = 6.0, unsynced: Unsynced | None = None) -> None:
    """Carry out one round: SIGKILL at a random moment, the start included."""
    run = line.run()
    assert not run.wait_end(line.rng.uniform(0.3, longest_s)), f"it ended by itself: {line.log_end()}"
    run.kill()
    line.end_of(run, "SIGKILL", unsynced)


def kill_at_point(line: FaultLine, rule: str, unsynced: Unsynced | None = None, traffic_s: float = 4.0) -> bool:
    """Carry out one round: SIGKILL where `rule` says. Return True if it came within `traffic_s` of being ready."""
    run = line.run(rule)
    run.wait_ready()
    reached = run.wait_end(traffic_s)
    if not reached:
        run.kill()
    # One that cannot start because of a kill would have said so with an exit status.
    assert run.process.returncode == -signal.SIGKILL, line.log_end()
    line.end_of(run, rule.rsplit(":", 1)[0] if reached else "SIGKILL", unsynced)
    return reached


def refuse(line: FaultLine, run: Run, rule: str, for_s: float) -> None:
    """Switch a fault on in a running daemon for `for_s`; then it must take images again, without a restart.

    Where acceptance needs the refused call, publishers must hear `busy` meanwhile.
    """
    busy_before = line.busy_answers
    switch_faults(run.switch, [rule])
    if rule.startswith(NEEDED):
        until(lambda: line.busy_answers > busy_before + 3, line.log_end)
    time.sleep(for_s)
    switch_faults(run.switch, [])
    until(line.taken_more(20), line.log_end)
    assert not run.ended, line.log_end()


def point_of(call: Call, folder: Path) -> str | None:
    """Return the head of the rule for calls like this, as in `sync@.journal$`; None for files of others."""
    if call.path.startswith("socket/unix/"):
        return f"{call.call}@{Path(call.path).name}$" if call.path.endswith(("intake.sock", "results.sock")) else None
    path = Path(call.path)
    if not path.is_relative_to(folder) or "-shm" in path.name:
        return None
    inside = path.relative_to(folder).as_posix()
    if inside.startswith(("images/", "quarantine/")):
        return f"{call.call}@/{inside.split('/')[0]}/"
    return f"{call.call}@{re.sub(r'^segment-[0-9]+', '', path.name) if path.suffix == '.journal' else '/' + path.name}$"


def points_of(run: Run) -> Counter[str]:
    """Count how often a run came to each point."""
    return Counter(filter(None, (point_of(call, run.line.folder) for call in run.calls())))
