"""The live benchmark with experts of a few megabytes: each side really runs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from daemon.dispatch.trace import replay
from daemon.policy.matrix import Performance
from experts.spec import Answer, ExpertId, ExpertSpec, name_of
from experts.vision.infer import infer
from experts.vision.preprocess import Prepared, prepare
from experts.vision.slot import SlotPool
from tests.bench.live import libraries, server
from tests.bench.live.engine import run_engine
from tests.bench.live.expert_files import (
    ExpertRecipe,
    make_experts,
    make_pictures,
    read_experts,
)
from tests.bench.live.image_trace import ImageOrder, ImageTrace, make_trace, make_types
from tests.bench.live.libraries import CompileWork, compile_all, missing_library
from tests.bench.live.loading import Loader, Loading, loader_of
from tests.bench.live.server import RequestQueue, Waiting, run_server
from tests.bench.live.sides import (
    COMPARED,
    LiveOptions,
    LiveSetup,
    MachineCosts,
    SideInput,
    SideResult,
    run_side,
    side_of,
)
from tests.bench.online import POLICIES, live_rows
from tests.bench.processes import OwnProcesses
from tests.experts.direct import DirectReader

pytestmark = pytest.mark.test_all

torch.set_num_threads(1)

RECIPE = ExpertRecipe(classifiers=3, detectors=1, classifier="resnet18", detector="yolov8n", input_size=32)
PICTURES = 6


@pytest.fixture(scope="session")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_experts(tmp_path_factory.mktemp("stock"), RECIPE)


@pytest.fixture
def setup(catalog: Path, tmp_path: Path) -> LiveSetup:
    specs = read_experts(catalog)
    rows = tuple(Performance("cpu", spec.layout, 0.01, 0.01, 4, disk_s=0.05) for spec in specs.values())  # pyright: ignore[reportArgumentType]
    # After so long what hangs is ended.
    options = LiveOptions(tmp_path, RECIPE, requests=24, memory_share=0.8, limit_s=240.0)
    costs = MachineCosts(rows, {}, 1e9, "direct")
    return LiveSetup(options, tmp_path, {"float32": catalog}, specs, make_pictures(PICTURES, 1), costs, OwnProcesses())


def a_trace(images: int, recipe: ExpertRecipe = RECIPE, order: ImageOrder = "skewed") -> ImageTrace:
    return make_trace(make_types(recipe.classifier_names, recipe.detector_names), order, images, PICTURES, seed=3)


def an_input(setup: LiveSetup, side: str = "coserve-plus", images: int = 24, **changes) -> SideInput:
    """One run with memory for one classifier and the detector per executor."""
    return replace(setup.side_input(side, a_trace(images), "cold"), **changes)


def a_result(side: str, images: int = 10, seconds: float = 1.0, **fields) -> SideResult:
    values = {"stopped": False, "loads": 3, "loaded_bytes": 9, "waits_s": (0.1,) * images}
    return SideResult(side, images, seconds, **{**values, "latencies_s": (0.2,) * images, **fields})


@pytest.mark.test_all
@pytest.mark.parametrize("expert", ["part-000", "solder-0"])
@pytest.mark.parametrize("loading", ["ordinary", "kept", "openvino", "onnxruntime"])
def test_every_way_to_load_an_expert_gives_the_answers_of_its_slot(
    catalog: Path, loading: Loading, expert: str
) -> None:
    if missing_library(loading):
        pytest.skip(f"{loading} is not installed")
    compile_all(CompileWork(catalog, tuple({loading} & libraries.LIBRARIES.keys())))
    spec = replace(read_experts(catalog)[ExpertId(expert)], confidence_floor=0.0)
    pool = SlotPool("cpu", spec.weights_bytes)
    pool.load(spec)
    loader = loader_of(loading, DirectReader(), spec.weights_bytes, 1, "cpu")
    prepared = [prepare(pair[0], "image", None, spec) for pair in make_pictures(2, seed=2)]
    for _ in range(2):  # the second time in memory, and in a module, that was there before
        model = loader.load(spec)
        for ours, theirs in zip(
            infer(pool.slot(spec.expert), prepared), loader.answer(model, spec, prepared), strict=True
        ):
            assert ours.confidence == pytest.approx(theirs.confidence, abs=1e-3)
        loader.give_up(model)


@pytest.mark.parametrize(
    "side",
    ["coserve-plus", *(pytest.param(side, marks=pytest.mark.test_all) for side in ("coserve", "samba-scheduling"))],
)
def test_every_image_of_the_trace_ends_and_visits_the_experts_of_the_trace(
    side: str, setup: LiveSetup, tmp_path: Path
) -> None:
    record = tmp_path / "run.jsonl"
    work = an_input(setup, side, record=record)
    result = run_engine(work)
    assert_all_ended(result)
    visits: dict[str, int] = {}
    for line in map(json.loads, record.read_text().splitlines()[1:]):
        if line["call"] == "next_action" and "batch" in (line["result"] or {}):
            expert = name_of(line["result"]["expert"])
            visits[expert] = visits.get(expert, 0) + len(line["result"]["batch"])
    assert visits == work.trace.visits()
    assert list(replay(record)) == []


def assert_all_ended(result: SideResult) -> None:
    assert (result.images, result.stopped, result.unknown, result.failure) == (24, False, 0, "")
    assert len(result.waits_s) == len(result.latencies_s) == 24
    times_s = zip(sorted(result.waits_s), sorted(result.latencies_s), strict=True)
    assert all(0 <= wait_s <= latency_s for wait_s, latency_s in times_s)
    assert result.peak_bytes > 1e8


@pytest.mark.test_all
@pytest.mark.parametrize("side", [name for name, side in COMPARED.items() if side.scheduler == "server"])
def test_a_server_serves_every_image_once_at_each_of_its_experts(
    side: str, setup: LiveSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = side_of(side).loading
    if missing_library(loading):
        pytest.skip(f"{loading} is not installed")
    compile_all(CompileWork(setup.catalogs["float32"], tuple({loading} & libraries.LIBRARIES.keys())))
    visits: dict[str, int] = {}

    def counting(*arguments: Any) -> Loader:
        loader = loader_of(*arguments)
        answer = loader.answer

        def counted(model: Any, spec: ExpertSpec, prepared: Sequence[Prepared]) -> Sequence[Answer]:
            visits[spec.name] = visits.get(spec.name, 0) + len(prepared)
            return answer(model, spec, prepared)

        loader.answer = counted
        return loader

    monkeypatch.setattr(server, "loader_of", counting)
    work = an_input(setup, side)
    assert_all_ended(run_server(work))
    assert visits == work.trace.visits()


def requests(experts: str) -> list[Waiting]:
    return [Waiting(number, 0, ExpertId(name)) for number, name in enumerate(experts)]


@pytest.mark.parametrize(
    ("window", "batches"),
    [(1, ["a", "b", "a", "bb", "aa"]), (4, ["aa", "bbb", "aa"]), (None, ["aaa", "bbb", "a"])],
)
def test_a_batch_is_of_the_oldest_requests_expert_within_the_window(window: int | None, batches: list[str]) -> None:
    queue = RequestQueue(window, 3)
    queue.waiting.extend(requests("ababbaa"))
    taken: list[str] = []
    while batch := queue.take():
        taken.append("".join(each.expert for each in batch))
        assert [each.image for each in batch] == sorted(each.image for each in batch)
    assert taken == batches


@pytest.mark.test_all
def test_ray_serve_serves_every_image(setup: LiveSetup) -> None:
    if missing_library("ray"):
        pytest.skip("Ray Serve is not installed")
    assert_all_ended(setup.run(an_input(setup, "ray-slots")))


@pytest.mark.test_all
def test_images_arrive_at_their_times_and_late_ones_are_unknown(setup: LiveSetup) -> None:
    trace = a_trace(24).arriving(40.0, "poisson")
    for side in ("coserve-plus", "samba-slots"):
        assert run_side(an_input(setup, side, trace=trace)).seconds > trace.images[-1].arrives_s
        assert run_side(an_input(setup, side, deadline_s=0.001)).unknown == 24


def test_online_rows_are_of_runs_with_and_without_deadlines(setup: LiveSetup) -> None:
    runs: list[SideInput] = []

    def run(work: SideInput) -> SideResult:
        runs.append(work)
        images = len(work.trace.images)
        if work.deadline_s is None:
            return a_result(work.side, images, seconds=images / 10.0)
        return a_result(work.side, images - 4, unknown=2)

    setup = replace(setup, options=replace(setup.options, limit_s=5.0))
    saturated, rows = live_rows(setup, (0.9,), 3.0, run)
    assert saturated == {"poisson": 10.0, "bursty": 10.0}
    assert [(row["arrivals"], row["policy"]) for row in rows] == [
        (kind, policy) for kind in ("poisson", "bursty") for policy in POLICIES
    ]
    assert all((row["unknown_share"], row["finished"]) == (0.25, 1.0) for row in rows)
    assert sum(work.deadline_s == 3.0 for work in runs) == 6
    assert sum(work.trace.order == "board" for work in runs) == 7
