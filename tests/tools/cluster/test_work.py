"""Answers of long work that are kept, and a worker's cache, without a cluster."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.cluster.messages import plain_spec
from daemon.cluster.worker import CACHE, CACHE_SIZE
from experts.errors import ExpertError
from tests.experts.pictures import a_picture, encoded
from tests.experts.samples import an_expert_file
from tools.cluster.carry_out import carry_out, work_version
from tools.cluster.kinds import answer_on_cluster
from tools.cluster.work import LongWork


class Ray:
    """Ray with one process: a call runs when it is made, and its reference is its outcome."""

    exceptions = SimpleNamespace(RayTaskError=TimeoutError, RayError=TimeoutError)

    def __init__(self, answer: Callable[[str, str], str]) -> None:
        self._answer = answer

    def remote(self, **_: Any) -> Callable[[Any], Any]:
        run = SimpleNamespace(remote=lambda _version, kind, values, *_: self._answer(kind, values))
        return lambda _function: run

    def put(self, content: bytes) -> bytes:
        return content

    def get(self, outcome: Any) -> Any:
        return outcome

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}


def test_an_error_of_a_worker_is_not_kept_for_the_command_that_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    spec, picture = an_expert_file(tmp_path / "weights"), tmp_path / "a.jpg"
    picture.write_bytes(encoded(a_picture()))
    answers = [{"error": "the bytes are not those of the catalog"}, {"answers": [["ok", 0.9]]}]
    work = LongWork(Ray(lambda _kind, _values: json.dumps(answers.pop(0))))
    with pytest.raises(ExpertError, match="are not those of the catalog"):
        list(answer_on_cluster(work, spec, [[picture]]))
    ((answer,),) = answer_on_cluster(work, spec, [[picture]])
    assert answer.label == "ok"


def test_a_file_that_was_cut_in_a_workers_cache_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "get", lambda content: content)
    monkeypatch.setattr(os, "nice", lambda _by: 0)
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv(CACHE_SIZE, str(1 << 30))
    spec = an_expert_file(tmp_path / "weights")
    weights = {f"/{spec.sha256}": (spec.sha256, spec.file.read_bytes())}
    values, pictures = json.dumps({"spec": plain_spec(spec)}), {"/images/000000": encoded(a_picture())}

    def measured() -> dict[str, Any]:
        return json.loads(carry_out(work_version(), "measure", values, pictures, weights))

    first = measured()
    assert len(first["answers"]) == 1
    os.truncate(tmp_path / "cache" / spec.sha256, 5000)
    assert measured() == first
