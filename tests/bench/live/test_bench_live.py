"""The live benchmark with experts of a few megabytes: each side really runs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from daemon.policy.matrix import Performance
from experts.spec import ExpertId
from experts.vision.infer import infer
from experts.vision.preprocess import prepare
from experts.vision.slot import SlotPool
from tests.bench.live import libraries
from tests.bench.live.expert_files import ExpertRecipe, make_experts, make_pictures, read_experts
from tests.bench.live.image_trace import ImageOrder, ImageTrace, make_trace, make_types
from tests.bench.live.libraries import CompileWork, compile_all, missing_library
from tests.bench.live.loading import Loading, loader_of
from tests.bench.live.server import RequestQueue, Waiting
from tests.bench.live.sides import (
    COMPARED,
    SIDES,
    LiveOptions,
    LiveSetup,
    MachineCosts,
    SideInput,
    SideResult,
    run_side,
)
from tests.bench.online import live_rows
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
    costs = MachineCosts(rows, 1e9, "direct")
    return LiveSetup(options, tmp_path, {"float32": catalog}, specs, make_pictures(PICTURES, 1), costs, OwnProcesses())


def a_trace(images: int, recipe: ExpertRecipe = RECIPE, order: ImageOrder = "skewed") -> ImageTrace:
    return make_trace(make_types(recipe.classifier_names, recipe.detector_names), order, images, PICTURES, seed=3)


def an_input(setup: LiveSetup, side: str = "coserve-plus", images: int = 24, **changes) -> SideInput:
    """One run with memory for one classifier and the detector per executor."""
    return replace(setup.side_input(side, a_trace(images), "cold"), **changes)


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
    ["coserve-plus", "coserve", "samba-scheduling", *(n for n, side in COMPARED.items() if side.scheduler == "server")],
)
def test_every_image_of_the_trace_ends(side: str, setup: LiveSetup) -> None:
    loading = SIDES[side].loading
    if missing_library(loading):
        pytest.skip(f"{loading} is not installed")
    compile_all(CompileWork(setup.catalogs["float32"], tuple({loading} & libraries.LIBRARIES.keys())))
    assert_all_ended(run_side(an_input(setup, side)))


def assert_all_ended(result: SideResult) -> None:
    assert (result.images, result.stopped, result.unknown, result.failure) == (24, False, 0, "")
    assert len(result.waits_s) == len(result.latencies_s) == 24
    times_s = zip(sorted(result.waits_s), sorted(result.latencies_s), strict=True)
    assert all(0 <= wait_s <= latency_s for wait_s, latency_s in times_s)
    assert result.peak_bytes > 1e8


@pytest.mark.parametrize(
    ("window", "batches"),
    [(1, ["a", "b", "a", "bb", "aa"]), (4, ["aa", "bbb", "aa"]), (None, ["aaa", "bbb", "a"])],
)
def test_a_batch_is_of_the_oldest_requests_expert_within_the_window(window: int | None, batches: list[str]) -> None:
    queue = RequestQueue(window, 3)
    queue.waiting.extend(Waiting(number, 0, ExpertId(name)) for number, name in enumerate("ababbaa"))
    taken: list[str] = []
    while batch := queue.take():
        taken.append("".join(each.expert for each in batch))
        assert [each.image for each in batch] == sorted(each.image for each in batch)
    assert taken == batches


def test_ray_serve_serves_every_image(setup: LiveSetup) -> None:
    if missing_library("ray"):
        pytest.skip("Ray Serve is not installed")
    assert_all_ended(setup.run(an_input(setup, "ray-slots")))


def test_images_arrive_at_their_times_and_late_ones_are_unknown(setup: LiveSetup) -> None:
    trace = a_trace(24).arriving(40.0, "poisson")
    for side in ("coserve-plus", "samba-slots"):
        assert run_side(an_input(setup, side, trace=trace)).seconds > trace.images[-1].arrives_s
    saturated, (row,) = live_rows(setup, (0.9,), 0.001, run_side, "cold", ("poisson",), ("coserve-plus",))
    assert saturated["poisson"] > 0
    assert (row["finished"], row["unknown_share"]) == (1.0, 1.0)
