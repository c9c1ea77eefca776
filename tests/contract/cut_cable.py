"""Run in a network namespace of its own: a line, and its worker behind a cable that is cut and mended under load.

`unshare --user --map-root-user --net python -m tests.contract.cut_cable FOLDER EXPERTS` fails if an image is lost.
"""

import subprocess
import sys
from pathlib import Path

from tests.contract.client import Line
from tests.contract.cluster import (
    RAY_S,
    THERE,
    TOO_SMALL,
    RayCluster,
    each_was_judged_once,
    images_for_two,
    judged_there,
    times_lost,
    until_used,
)
from tests.lines import COSERVE_RUN
from tests.waiting import until

HERE_IP, THERE_IP = "10.77.0.1", "10.77.0.2"


def run(*command: str) -> None:
    subprocess.run(command, check=True)


class Cable:
    """A network namespace for the other PC, and the way there. Addresses are on `lo`, and stay when it is cut."""

    def __init__(self) -> None:
        self._there = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        space = Path(f"/proc/{self._there.pid}/ns/net")
        until(lambda: space.readlink() != Path("/proc/self/ns/net").readlink())
        self.before_worker = ("nsenter", f"--net={space}")
        run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there", "netns", str(self._there.pid))
        for before, ip in (((), HERE_IP), (self.before_worker, THERE_IP)):
            run(*before, "ip", "link", "set", "lo", "up")
            run(*before, "ip", "address", "add", f"{ip}/32", "dev", "lo")
        run(*self.before_worker, "ip", "link", "set", "there", "up")
        run(*self.before_worker, "ip", "route", "add", "default", "dev", "there", "src", THERE_IP)
        self.mend()

    def cut(self) -> None:
        run("ip", "link", "set", "here", "down")

    def mend(self) -> None:
        run("ip", "link", "set", "here", "up")
        run("ip", "route", "add", "default", "dev", "here", "src", HERE_IP)

    def end(self) -> None:
        self._there.kill()
        self._there.wait()


def main(folder: Path, experts: Path) -> None:
    cable = Cable()
    cluster = RayCluster(folder, HERE_IP, cable.before_worker)
    try:
        cluster.start()
        devices = TOO_SMALL | THERE
        line = Line(folder / "line", experts, command=COSERVE_RUN, devices=devices, cluster=cluster.settings)
        with line.service():
            until_used(line)
            with line.camera(images_for_two(line)) as account:
                judged_there(line, more_than=0)
                lost = times_lost(line)
                cable.cut()
                line.wait(lambda: times_lost(line) > lost, RAY_S)
                count = len(line.rows("SELECT 1 FROM inspections"))
                line.wait(lambda: len(line.rows("SELECT 1 FROM inspections")) > count + 5)
                cable.mend()
                until_used(line)
                judged_there(line, more_than=judged_there(line))
            line.idle()
            line.wait(lambda: line.status()["state"] == "ready", RAY_S)
        each_was_judged_once(line, account.sent)
    finally:
        cluster.end()
        cable.end()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
