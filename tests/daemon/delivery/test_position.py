"""The file that says how far a consumer was delivered: whole or the one before, and never believed when damaged."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.delivery.position import DeliveryPosition, Mark, PositionError, PositionFile

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
