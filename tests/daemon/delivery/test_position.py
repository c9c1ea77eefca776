"""The file that says how far a consumer was delivered: whole or the one before, and never believed when damaged."""

import hashlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.delivery.position import DeliveryPosition, Mark, PositionError, PositionFile
from tests.waiting import PATIENCE_S

AT = "2026-11-22T07:00:00.000Z"


def signed(content: bytes) -> bytes:
    return content + b"\n" + hashlib.sha256(content).hexdigest().encode() + b"\n"


@pytest.mark.promise(
    "Delivery to the plant",
    "A position file is complete or the previous one; a damaged one is rejected",
)
@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:20],
        lambda whole: whole.replace(b"9", b"8", 1),
        lambda whole: whole.split(b"\n")[0],
        lambda whole: b"\xff\xfe" + whole,
        lambda whole: bytes(len(whole)),
        lambda whole: signed(b"{}"),
        lambda whole: signed(b"9"),
        lambda whole: signed(b'{"position": -1, "missed": 0, "marks": []}'),
    ],
)
def test_a_damaged_file_is_named_and_not_believed(tmp_path: Path, damage) -> None:
    file = PositionFile(tmp_path, "plant")
    file.save(DeliveryPosition(9))
    file.path.write_bytes(damage(file.path.read_bytes()))
    with pytest.raises(PositionError, match=r"plant\.position is damaged"):
        file.load()


@given(st.lists(st.integers(1, 500), min_size=1, max_size=200))
def test_marks_are_few_and_reach_back_ever_further(steps: list[int]) -> None:
    position, seq = DeliveryPosition(0), 0
    for step in steps:
        seq += step
        position = position.moved(seq, [Mark(seq, AT)])
    seqs = [mark.seq for mark in position.marks]
    assert seqs == sorted(set(seqs))
    assert seqs[-1] == seq
    assert len(seqs) <= seq.bit_length() + 1
    assert seqs[0] <= max(steps[0], seq // 2)


def test_a_kill_at_any_moment_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    code = (
        "import itertools, pathlib, sys\n"
        "from daemon.delivery.position import *\n"
        "file = PositionFile(pathlib.Path(sys.argv[1]), 'plant')\n"
        "for seq in itertools.count(1): file.save(DeliveryPosition(seq))"
    )
    last = 0
    for _ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
        until_s = time.monotonic() + PATIENCE_S
        file = PositionFile(tmp_path, "plant")
        while (position := file.load()) is None or position.seq < last % 7 + 5:
            assert time.monotonic() < until_s
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        position = file.load()
        assert position is not None
        last = position.seq
        file.path.unlink()
