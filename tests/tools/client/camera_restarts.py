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

from coserve_client import SpoolingPublisher
from tests.lines import a_jpeg, a_line
from tests.simulated import a_service
from tools.setup.service import Service

IMAGES = 500
RULES = """\
boards:
  b: {components: {R0402: 100000}}
classifiers:
  "*": {expert: "{component}", pass: [ok, odd, bad], review_below: 0.0}
"""
CAMERA = """\
import sys, time
from pathlib import Path
from coserve_client import SpoolingPublisher
endpoint, spool, first, picture = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
publisher = SpoolingPublisher(endpoint, "cam", spool)
for number in range(first, 10**9):
    payload = picture.read_bytes() + b"%d" % number
    publisher.publish(f"i{number}", payload, board={"type": "b", "serial": "S"}, component="R0402")
    print(number, publisher.account.in_memory, flush=True)
    time.sleep(0.01)
"""


def a_small_line(folder: Path, experts: Path) -> tuple[Service, str]:
    """A running line, and its intake."""
    config = a_line(folder / "line", experts, memory="300MB")
    (folder / "line/rules.yaml").write_text(RULES, encoding="utf-8")
    service = a_service(config, folder / "daemon.log")
    service.start()
    return service, f"ipc://{folder}/line/run/intake.sock"


def stored(folder: Path) -> dict[str, int]:
    """The number of rows of each image."""
    with closing(sqlite3.connect(f"file:{folder}/line/inspection.db?mode=ro", uri=True)) as database:
        return dict(database.execute("SELECT image_id, count(*) FROM inspections GROUP BY image_id").fetchall())


def test_five_kills_of_the_daemon_while_500_images_are_published(tmp_path: Path, experts_folder: Path) -> None:
    service, intake = a_small_line(tmp_path, experts_folder)
    picture, longest_s = a_jpeg(1), 0.0
    with SpoolingPublisher(intake, "cam", tmp_path / "spool") as publisher:
        for number in range(IMAGES):
            payload, began_s = picture + b"%d" % number, time.monotonic()
            publisher.publish(f"i{number}", payload, board={"type": "b", "serial": "S"}, component="R0402")
            longest_s = max(longest_s, time.monotonic() - began_s)
            if number % 100 == 50:
                service.kill()
            elif number % 100 == 90:
                service.start()
            time.sleep(0.01)
        assert publisher.wait(120.0), publisher.account
        account = publisher.account
    service.stop()
    print(f"longest publish {longest_s * 1000:.2f} ms, {account.as_dict()}")
    assert account.complete
    assert stored(tmp_path) == {f"i{number}": 1 for number in range(IMAGES)}


def test_kills_of_the_camera_cost_at_most_what_was_in_its_memory(tmp_path: Path, experts_folder: Path) -> None:
    service, intake = a_small_line(tmp_path, experts_folder)
    picture, spool = tmp_path / "picture.jpg", tmp_path / "spool"
    picture.write_bytes(a_jpeg(1))
    first, may_be_lost = 0, 0
    for turn in range(3):
        if turn == 1:
            service.kill()  # the second camera publishes into its spool only
        if turn == 2:
            service.start()
        words = [sys.executable, "-c", CAMERA, intake, spool, str(first), picture]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as camera:
            assert camera.stdout is not None
            output = camera.stdout.readline()
            time.sleep(3.0)
            camera.send_signal(signal.SIGKILL)
            output += camera.stdout.read()
        number, in_memory = map(int, output.splitlines()[-1].split())
        first, may_be_lost = number + 2, may_be_lost + in_memory + 1
    with SpoolingPublisher(intake, "cam", spool) as publisher:
        assert publisher.wait(120.0), publisher.account
        assert publisher.account.set_aside <= 1  # the one that was being written
    service.stop()
    images = stored(tmp_path)
    print(f"{first} published, {len(images)} stored, {may_be_lost} were in memory at three kills")
    assert set(images.values()) == {1}
    assert len(images) >= first - 3 - may_be_lost
