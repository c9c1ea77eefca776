"""Frames between the daemon and its process for the cluster, and the values in them."""

import json
import socket
import struct
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.cluster.messages import (
    SentImage,
    batch_of,
    checked_report,
    packed_batch,
    plain_report,
    plain_spec,
    receive,
    send,
    spec_of,
)
from daemon.dispatch.pool import Batch, Fault
from daemon.policy.request import ExecutorId
from daemon.records import JournalKey, Pixels
from experts.spec import Answer, ArchitectureId, Detection, ExpertId, ExpertSpec, LayoutId

SPEC = ExpertSpec(
    ExpertId("R0402"), ArchitectureId("resnet18"), "classify", Path("/line/R0402.safetensors"), ("ok", "bad"), 64,
    (0.1, 0.2, 0.3), (1.0, 1.0, 1.0), "ab" * 32, LayoutId("a-layout"), 4096, temperature=1.1,
)  # fmt: skip
CPU = ExecutorId("cpu/0")
BACKBONE = replace(SPEC, expert=ExpertId("backbone"), classes=(), sha256="cd" * 32)


def test_frames_arrive_whole_and_in_order_however_the_bytes_are_cut():
    ours, theirs = socket.socketpair()
    body = bytes(range(256)) * 20_000

    def write() -> None:
        send(ours, {"do": "run", "name": "Ünï"}, [body[:5], body[5:]])
        send(ours, {"do": "ping"})
        ours.close()

    thread = threading.Thread(target=write)
    thread.start()
    with theirs, theirs.makefile("rb") as stream:
        assert receive(stream) == ({"do": "run", "name": "Ünï"}, body)
        assert receive(stream) == ({"do": "ping"}, b"")
        assert receive(stream) is None
    thread.join()


@pytest.mark.parametrize(
    "frame",
    [
        b"\0\0\0",
        struct.pack(">II", 1 << 31, 0),
        struct.pack(">II", 2, (1 << 30) + 1) + b"{}",
        struct.pack(">II", 5, 0) + b"{}",
        struct.pack(">II", 2, 10) + b"{}abc",
        struct.pack(">II", 4, 0) + b"nope",
        struct.pack(">II", 2, 0) + b"[]",
    ],
    ids=["cut lengths", "long head", "long body", "cut head", "cut body", "not JSON", "no object"],
)
def test_a_frame_that_is_not_one_ends_the_connection(frame: bytes):
    ours, theirs = socket.socketpair()
    with ours, theirs, theirs.makefile("rb") as stream:
        ours.sendall(frame)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            receive(stream)


def test_a_batch_crosses_with_its_heads_and_only_the_digests_of_its_files():
    heads = [replace(SPEC, expert=ExpertId(name), sha256=name * 64, backbone=BACKBONE) for name in "ef"]
    pixels = [Pixels(), Pixels("raw", (2, 1, 3)), Pixels(), Pixels()]
    images = [SentImage(JournalKey(1, number, 3), each) for number, each in enumerate(pixels)]
    packed = packed_batch(Batch(7, CPU, BACKBONE, images, heads * 2), (0, 1, 3), (3, 6, 0))
    batch, payloads = batch_of(packed + b"abcdefghi", len(packed), CPU, Path("/cache"))
    assert batch.number == 7
    assert batch.spec == replace(BACKBONE, file=Path("/cache") / BACKBONE.sha256)
    assert [payloads[image.key] for image in batch.images] == [b"abc", b"defghi", b""]
    assert [image.pixels for image in batch.images] == [pixels[0], pixels[1], pixels[3]]
    assert [head and head.expert for head in batch.heads] == ["e", "f", "f"]
    assert batch.heads[1] is batch.heads[2]
    assert batch.heads[0] is not None
    assert batch.heads[0].backbone == batch.spec
    assert spec_of(json.loads(json.dumps(plain_spec(SPEC))), SPEC.file.parent) == replace(
        SPEC, file=SPEC.file.parent / SPEC.sha256
    )


def test_a_report_comes_back_as_it_was():
    box = Detection("bridge", 0.1 + 0.2, (1.0, 2.5, 3.0, 4.0))
    batch = Batch(3, CPU, SPEC, [SentImage(JournalKey(1, number, 3), Pixels()) for number in range(2)], [None] * 2)
    batch.answers = [Answer("bridge", 0.1 + 0.2, (box,)), Fault("bad_image", "cut short")]
    batch.sizes = [(80, 60), (0, 0)]
    batch.infer_ms, batch.memory_limit, batch.device_error = 12.5, 4, "CUDA error"
    arrived = checked_report(json.loads(json.dumps(plain_report(batch))), [replace(SPEC, classes=("bridge",))] * 2)
    assert (list(arrived.answers), list(arrived.sizes)) == (batch.answers, batch.sizes)
    names = ("infer_ms", "memory_limit", "device_error")
    assert [getattr(arrived, name) for name in names] == [getattr(batch, name) for name in names]
