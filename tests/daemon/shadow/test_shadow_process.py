"""`python -m daemon.shadow` by itself: what it answers for whole networks, heads, and images whose bytes are gone."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from daemon.records import BoardRef, Image, JournalKey
from daemon.shadow.shadows import ShadowImage
from daemon.storage.journal import Journal
from routing_rules.routes import ClassifierStep, Judgement
from tests.contract.client import Line
from tests.contract.test_families_live import LABELS, put_heads, write_heads
from tests.lines import a_jpeg
from tests.waiting import PATIENCE_S
from tools.experts.change import mark_shadow, put
from tools.experts.line import open_line

pytestmark = pytest.mark.test_all


@contextmanager
def a_process(line: Line) -> Iterator[socket.socket]:
    """Yield the daemon's end of its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    heart = os.eventfd(0)
    argv = [sys.executable, "-m", "daemon.shadow", str(line.config), str(theirs.fileno()), "--heart", str(heart)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=(theirs.fileno(), heart))
    ours.settimeout(PATIENCE_S)
    try:
        with ours, theirs:
            yield ours
            assert os.eventfd_read(heart) > 0
    finally:
        process.kill()
        process.communicate()
        os.close(heart)


def ask(ours: socket.socket, *parts: Any) -> dict[str, Any]:
    """Return the row that comes of an image's answer, or what is said instead."""
    image = ShadowImage(*parts)
    ours.send(image.question)
    answer = json.loads(ours.recv(1 << 17))
    return image.row(answer) if "label" in answer else answer


def an_image(key: JournalKey) -> Image:
    return Image("cam", "i7", BoardRef("free", "S1"), "P", "P1", inspection_id=7, key=key)


def test_a_head_answers_on_its_backbone_and_images_without_bytes_are_left_out(
    tmp_path: Path, torch_experts_folder: Path
):
    line = Line(tmp_path / "line", torch_experts_folder, memory="150MB")
    folder, other = line.folder / "experts", tmp_path / "other"
    for name in ("R0402", "C0603"):
        (folder / f"{name}.safetensors").unlink()  # links to the session's files
    put_heads(folder, write_heads(folder))
    entries = write_heads(other, seed=2)
    (other / "catalog.yaml").write_text("experts: {}\n", encoding="utf-8")
    put_heads(other, {"R0402": entries["R0402"]})
    experts = open_line(line.config)
    version = put(experts, "R0402", other)
    mark_shadow(experts, "R0402", version, images=1, agreement=0.5)
    (key,) = Journal(experts.config.journal).append([a_jpeg(3, 100, 70)])
    codes = MappingProxyType({"ok": "D1", "bad": "D2"})  # as compiled rules have them
    step = ClassifierStep("first", "R0402", ("odd",), codes=codes)
    service = Judgement("pass", None, None)
    with a_process(line) as ours:
        row = ask(ours, an_image(key), version, 2, step, None, service)
        assert row["label"] in LABELS
        assert {name: row[name] for name in ("inspection_id", "expert", "expert_version", "step")} == {
            "inspection_id": 7, "expert": "R0402", "expert_version": version, "step": 2,
        }  # fmt: skip
        outcome = {"odd": "pass", "ok": "fail D1", "bad": "fail D2"}[row["label"]]
        assert (row["outcome"], row["outcome_in_service"]) == (outcome, "pass")
        before = Judgement("review", "D9", None)  # an earlier step was unsure
        unsure = ask(ours, an_image(key), version, 2, replace(step, pass_labels=LABELS), before, service)
        assert unsure["outcome"] == "review"
        left_out = {"inspection_id": 7, "step": 0, "expert": "R0402"}
        assert ask(ours, an_image(JournalKey(9, 16, 4)), version, 0, step, None, service) == left_out
        assert ask(ours, an_image(replace(key, length=5)), version, 0, step, None, service) == left_out
        assert ask(ours, an_image(key), "0" * 12, 0, step, None, service) == left_out, "an older mark's image"
        assert ask(ours, an_image(key), version, 0, step, None, service)["label"] == row["label"]
    assert experts.experts()["R0402"].shadow is not None
