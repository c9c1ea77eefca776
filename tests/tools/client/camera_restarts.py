"""Five SIGKILLs of the daemon, and three of the camera, while 500 images are published: each one row, none lost.

Not part of `make test` (starts of a daemon take long): `make test-cameras`.
"""

import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from coserve_client import SpoolingPublisher
from tests import ROOT
from tests.lines import a_jpeg, a_line
from tools.setup.service import Service

IMAGES = 500
RULES = """\
boards:
  b: {components: {R0402: 100000}}
classifiers:
  "*": {expert: "{component}", pass: [ok, odd, bad], review_below: 0.0}
"""


def a_small_line(folder: Path, experts: Path) -> Service:
    config = a_line(folder / "line", experts, memory="300MB")
    (folder / "line/rules.yaml").write_text(RULES, encoding="utf-8")
    return Service(config, folder / "daemon.log")


def rows(folder: Path) -> list[tuple[str, int]]:
    with closing(sqlite3.connect(f"file:{folder}/line/inspection.db?mode=ro", uri=True)) as database:
        return database.execute("SELECT image_id, count(*) FROM inspections GROUP BY image_id").fetchall()


def test_five_kills_of_the_daemon_while_500_images_are_published(tmp_path: Path, experts_folder: Path) -> None:
    service = a_small_line(tmp_path, experts_folder)
    service.start()
    picture, longest_s, kills = a_jpeg(1), 0.0, 0
    with SpoolingPublisher(f"ipc://{tmp_path}/line/run/intake.sock", "cam", tmp_path / "spool") as publisher:
        for number in range(IMAGES):
            began_s = time.monotonic()
            publisher.publish(
                f"i{number}", picture + b"%d" % number, board={"type": "b", "serial": "S"}, component="R0402"
            )
            longest_s = max(longest_s, time.monotonic() - began_s)
            if number % 100 == 50:
                service.kill()
                kills += 1
            elif number % 100 == 90:
                service.start()
            time.sleep(0.01)
        assert publisher.wait(120.0), publisher.account
        account = publisher.account
    service.stop()
    print(f"{kills} kills, longest publish {longest_s * 1000:.2f} ms, {account.as_dict()}")
    assert kills == 5
    assert account.complete
    assert not account.differing
    assert sorted(rows(tmp_path)) == sorted((f"i{number}", 1) for number in range(IMAGES))


CAMERA = """\
import sys, time
from pathlib import Path
from coserve_client import SpoolingPublisher
endpoint, spool, first = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
publisher = SpoolingPublisher(endpoint, "cam", spool)
for number in range(first, 10**9):
    publisher.publish(f"i{number}", Path(sys.argv[4]).read_bytes() + b"%d" % number,
                      board={"type": "b", "serial": "S"}, component="R0402")
    print(number, publisher.account.in_memory, flush=True)
    time.sleep(0.01)
"""


@pytest.mark.parametrize("seed", [1])
def test_kills_of_the_camera_cost_at_most_what_was_in_its_memory(
    tmp_path: Path, experts_folder: Path, seed: int
) -> None:
    service = a_small_line(tmp_path, experts_folder)
    service.start()
    (tmp_path / "picture.jpg").write_bytes(a_jpeg(seed))
    words = [f"ipc://{tmp_path}/line/run/intake.sock", str(tmp_path / "spool")]
    first, may_be_lost = 0, 0
    for turn in range(3):
        if turn == 1:
            service.kill()  # the second camera publishes into its spool only
        if turn == 2:
            service.start()
        with subprocess.Popen(
            [sys.executable, "-c", CAMERA, *words, str(first), str(tmp_path / "picture.jpg")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        ) as camera:
            assert camera.stdout is not None
            said = camera.stdout.readline()
            time.sleep(3.0)
            camera.send_signal(signal.SIGKILL)
            number, in_memory = map(int, (said + camera.stdout.read()).splitlines()[-1].split())
        first, may_be_lost = number + 2, may_be_lost + in_memory + 1
    with SpoolingPublisher(words[0], "cam", tmp_path / "spool") as publisher:
        assert publisher.wait(120.0), publisher.account
        assert publisher.account.set_aside <= 1  # the one that was being written
    service.stop()
    got = rows(tmp_path)
    print(f"{first} published, {len(got)} stored, {may_be_lost} were in memory at three kills")
    assert {count for _, count in got} == {1}
    assert len(got) >= first - 3 - may_be_lost
