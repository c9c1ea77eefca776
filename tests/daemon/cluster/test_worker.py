"""The worker of one device: what it computes is what the line itself would compute."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from daemon.cluster.messages import Report, SentImage, code_version, packed_batch, plain_spec
from daemon.cluster.worker import CACHE, CACHE_SIZE, DeviceWorker
from daemon.dispatch.pool import Batch, Fault
from daemon.policy.request import ExecutorId
from daemon.records import JournalKey, Pixels
from experts.spec import Answer, ExpertSpec
from experts.vision.infer import infer
from experts.vision.preprocess import prepare
from experts.vision.slot import loaded_slot
from tests.experts.pictures import a_picture, encoded
from tests.experts.samples import an_expert_file

PICTURES = [encoded(a_picture(seed=seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ExpertSpec:
    return an_expert_file(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def worker(tmp_path: Path, spec: ExpertSpec, monkeypatch: pytest.MonkeyPatch) -> DeviceWorker:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv(CACHE_SIZE, str(1 << 30))
    settings = {"executors": 1, "threads": 1, "activation_memory": None, "expert_memory": 1}
    about = {"device": "cpu", "settings": settings, "max_pixels": 1 << 20, "host": "pc2"}
    worker = DeviceWorker()
    worker.open(json.dumps(about | {"pools": {"p": spec.weights_bytes}, "executors": {"p/0": "p"}}))
    return worker


def sent(worker: DeviceWorker, spec: ExpertSpec, alter: Callable[[bytes], bytes] = lambda content: content) -> str:
    content = alter(spec.file.read_bytes())
    return worker.take(spec.sha256, len(content), 0, content)


def loaded(worker: DeviceWorker, spec: ExpertSpec) -> dict[str, object]:
    return json.loads(worker.load("p", json.dumps(plain_spec(spec))))


def answer_of(
    worker: DeviceWorker, spec: ExpertSpec, payloads: list[bytes], batch: int = 1, head: ExpertSpec | None = None
) -> dict[str, Any]:
    images = [SentImage(JournalKey(0, n, 1), Pixels()) for n in range(len(payloads))]
    sent = Batch(batch, ExecutorId("p/0"), spec, images, [head] * len(images))
    packed = packed_batch(sent, range(len(payloads)), [*map(len, payloads)])
    return json.loads(worker.run("p/0", len(packed), b"".join((packed, *payloads))))


def run(
    worker: DeviceWorker, spec: ExpertSpec, payloads: list[bytes], batch: int = 1, head: ExpertSpec | None = None
) -> dict[str, Any]:
    return answer_of(worker, spec, payloads, batch, head)["report"]


def test_weights_are_asked_for_once_and_answers_are_the_lines_own(worker: DeviceWorker, spec: ExpertSpec):
    assert worker.hello() == code_version()
    assert loaded(worker, spec) == {"missing": [spec.sha256]}
    assert sent(worker, spec) == ""
    assert loaded(worker, spec)["bytes"] == spec.weights_bytes
    new_versions = {"1" * 64: spec.sha256, "2" * 64: "0" * 64}  # only where the old one was
    assert json.loads(worker.prefetch(json.dumps(new_versions))) == {"missing": ["1" * 64]}
    worker.unload("p", spec.expert)
    worker.unload("p", "never there")
    assert loaded(worker, spec) == {"bytes": spec.weights_bytes}
    report = run(worker, spec, [PICTURES[0], b"not an image", PICTURES[2]])
    answers = Report.model_validate(report).answers
    assert isinstance(answers[1], Fault)
    assert answers[1].kind == "bad_image"
    for number in (0, 2):
        (expected,) = infer(loaded_slot(spec), [prepare(PICTURES[number], "image", None, spec)])
        answer = answers[number]
        assert isinstance(answer, Answer)
        assert answer.label == expected.label
        assert answer.confidence == pytest.approx(expected.confidence, abs=1e-6)


def test_two_batches_keep_their_images_apart(worker: DeviceWorker, spec: ExpertSpec):
    sent(worker, spec)
    loaded(worker, spec)
    answers: dict[int, object] = {}
    threads = [
        threading.Thread(target=lambda n=n: answers.update({n: run(worker, spec, [PICTURES[n]], n)["answers"]}))
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answers[n] == run(worker, spec, [PICTURES[n]], 10 + n)["answers"] for n in range(3))
