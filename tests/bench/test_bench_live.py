"""The live benchmark with experts of a few megabytes: each side really runs."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from daemon.dispatch.trace import replay
from daemon.policy.matrix import Performance
from daemon.storage.journal import Journal
from experts.reading import CachedReader, DirectReader
from experts.slot import SlotPool
from experts.spec import ExpertId
from experts.vision.infer import infer
from experts.vision.preprocess import prepare
from routing_rules.compile import compile_rules
from tests.bench.arrivals import arriving
from tests.bench.bound import live_bound
from tests.bench.chart import draw_live
from tests.bench.compare import Cell, Comparison, Settings
from tests.bench.engine import run_engine
from tests.bench.job import JOB, NAIVE, ORDINARY, RUN, SIDES, Job, Run
from tests.bench.live import chosen
from tests.bench.measure import Machine, fit
from tests.bench.naive import run_naive
from tests.bench.ordinary import ModulePool, OrdinaryFiles, answer
from tests.bench.pictures import WIDTH_PX, goes_on, make_pictures
from tests.bench.stage import SideError, Size, Stage
from tests.bench.stock import Recipe, make_stock, ordinary_file, read_stock
from tests.bench.workload import BOARD_TYPE, PASS_RATE, Order, Trace, make_parts, make_trace
from tools.simulate.report import quantile

torch.set_num_threads(1)

RECIPE = Recipe(classifiers=3, detectors=1, classifier="resnet18", detector="yolov8n", input_size=32)
PICTURES = 6


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stock(tmp_path_factory.mktemp("stock"), RECIPE)


@pytest.fixture
def job(stock: Path, tmp_path: Path) -> Job:
    """Memory for one classifier and the detector per executor."""
    journal = Journal(tmp_path / "journal")
    keys = journal.append([payload for both in make_pictures(PICTURES, seed=1) for payload in both])
    journal.close()
    specs = read_stock(stock)
    sizes = {spec.task: spec.weights_bytes for spec in specs.values()}
    rows = tuple(Performance("cpu", spec.layout, 0.01, 0.01, 4, disk_s=0.05) for spec in specs.values())  # pyright: ignore[reportArgumentType]
    return Job(
        side="coserve-plus",
        trace=a_trace(requests=24),
        catalog=stock,
        journal=tmp_path / "journal",
        keys=tuple(keys),
        memory_bytes=2 * (sizes["classify"] + sizes["detect"]),
        disk="cold",
        limit_s=240.0,  # to end what hangs
        scratch=tmp_path,
        max_batch=4,
        matrix=rows,
    )


def a_trace(requests: int, recipe: Recipe = RECIPE, order: Order = "skewed", seed: int = 3) -> Trace:
    return make_trace(make_parts(*recipe.names()), order, requests, PICTURES, seed)


def a_run(side: str, images: int = 10, seconds: float = 1.0, **fields) -> Run:
    values = {
        "stopped": False,
        "loads": 3,
        "loaded_bytes": 9,
        "waits_s": (0.1,) * images,
        "latencies_s": (0.2,) * images,
    }
    return Run(side, images, seconds, **{**values, **fields})


def test_the_trace_is_the_same_for_the_same_seed_and_rules_know_only_rates() -> None:
    recipe = Recipe(classifiers=10, detectors=2)
    trace, again = (a_trace(4000, recipe) for _ in range(2))
    assert trace == again
    onward = [ask.goes_on for ask in trace.asks if ask.detector]
    assert sum(onward) / len(onward) == pytest.approx(PASS_RATE, abs=0.03)
    assert 0.4 < sum(part.detector is not None for part in trace.parts) / len(trace.parts) < 0.6
    routes = compile_rules(trace.rules())
    usage = routes.usage()
    for part in trace.parts:
        assert usage[part.classifier] == pytest.approx(part.usage, rel=0.01)
        assert sum(ask.classifier == part.classifier for ask in trace.asks) / 4000 == pytest.approx(
            part.usage, abs=0.03
        )
        if part.detector:
            assert routes.successors()[part.classifier] == ((part.detector, pytest.approx(PASS_RATE)),)
    assert routes.first_step(BOARD_TYPE, trace.parts[0].classifier) is not None


def test_in_board_order_one_placement_list_repeats_with_every_type_on_it() -> None:
    recipe = Recipe(classifiers=10, detectors=2)
    kinds = [ask.classifier for ask in a_trace(200, recipe, order="board").asks]
    length = next(n for n in range(10, 100) if kinds[:n] == kinds[n : 2 * n])
    assert set(kinds[:length]) == set(recipe.names()[0])
    assert kinds[: 200 - length] == kinds[length:]


def test_a_picture_carries_whether_its_image_goes_on_and_looks_the_same_otherwise() -> None:
    for both in make_pictures(2, seed=5):
        sizes = [_size(payload) for payload in both]
        assert sizes == [(WIDTH_PX, WIDTH_PX), (WIDTH_PX + 1, WIDTH_PX)]
        assert [goes_on(width) for width, _ in sizes] == [False, True]


def test_the_stock_is_made_once_and_every_file_has_bytes_of_its_own(stock: Path) -> None:
    specs = read_stock(stock)
    files = [file for spec in specs.values() for file in (spec.file, ordinary_file(spec))]
    assert len({file.read_bytes()[-4096:] + file.read_bytes()[40_000:41_000] for file in files}) == len(files) == 8
    assert all(file.stat().st_nlink == 1 and not file.is_symlink() for file in files)
    before = [file.stat().st_mtime_ns for file in files]
    assert make_stock(stock.parent, RECIPE) == stock
    assert [file.stat().st_mtime_ns for file in files] == before


@pytest.mark.parametrize("expert", ["part-000", "solder-0"])
def test_the_ordinary_model_and_the_slot_of_an_expert_answer_alike(stock: Path, expert: str) -> None:
    spec = replace(read_stock(stock)[ExpertId(expert)], confidence_floor=0.0)
    pool = SlotPool("cpu", spec.weights_bytes)
    pool.load(spec)
    model = OrdinaryFiles(DirectReader()).model(spec)
    assert not model.training
    prepared = [prepare(both[0], "image", None, spec) for both in make_pictures(2, seed=2)]
    for ours, theirs in zip(infer(pool.slot(spec.expert), prepared), answer(model, spec, prepared), strict=True):
        assert ours.confidence == pytest.approx(theirs.confidence, abs=1e-3)


@pytest.mark.parametrize("side", ["samba", "coserve", "coserve-plus", ORDINARY])
def test_every_image_of_the_trace_ends_and_visits_what_the_trace_says(side: str, job: Job, tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    run = run_engine(replace(job, side=side, record=record))
    assert (run.images, run.stopped, run.unknown, run.note) == (24, False, 0, "")
    assert len(run.waits_s) == len(run.latencies_s) == 24
    assert all(
        0 <= wait_s <= latency_s for wait_s, latency_s in zip(sorted(run.waits_s), sorted(run.latencies_s), strict=True)
    )
    seen: dict[str, int] = {}
    for line in map(json.loads, record.read_text().splitlines()[1:]):
        if line["call"] == "next_action" and "batch" in (line["result"] or {}):
            seen[line["result"]["expert"]] = seen.get(line["result"]["expert"], 0) + len(line["result"]["batch"])
    assert seen == job.trace.visits()
    assert list(replay(record)) == []


def test_naive_loads_for_every_step_of_every_image(job: Job) -> None:
    run = run_naive(replace(job, side=NAIVE, trace=a_trace(requests=6)))
    assert run.images == 6
    assert run.loads == sum(a_trace(requests=6).visits().values())


def test_a_side_is_stopped_at_the_limit_and_what_it_finished_counts(job: Job) -> None:
    run = run_engine(replace(job, side=ORDINARY, trace=a_trace(requests=2000), limit_s=0.5))
    assert run.stopped
    assert run.images < 2000
    assert run.seconds >= 0.5


def test_where_everything_fits_a_warm_side_loads_nothing(job: Job) -> None:
    specs = read_stock(job.catalog)
    memory_bytes = sum(spec.weights_bytes for spec in specs.values())
    run = run_engine(replace(job, side="samba", memory_bytes=memory_bytes, warm=True))
    assert (run.images, run.loads) == (24, 0)


def test_images_arrive_when_they_should_and_late_ones_are_unknown(job: Job) -> None:
    trace = arriving(job.trace, 40.0, "poisson")
    run = run_engine(replace(job, trace=trace))
    assert run.seconds > trace.asks[-1].at_s
    late = run_engine(replace(job, side=ORDINARY, deadline_s=0.001))
    assert late.unknown == late.late == 24


def test_boards_arrive_at_once_and_the_rate_is_kept() -> None:
    trace = a_trace(requests=2000)
    poisson, bursty = (arriving(trace, 100.0, kind).asks for kind in ("poisson", "bursty"))
    assert poisson[-1].at_s == pytest.approx(20.0, rel=0.1)
    assert len({ask.at_s for ask in bursty}) == 40
    assert bursty[0].at_s == bursty[49].at_s == 0.0
    assert [ask.picture for ask in poisson] == [ask.picture for ask in bursty]


def test_jobs_and_runs_survive_their_files(job: Job) -> None:
    assert JOB.validate_json(JOB.dump_json(job)) == job
    assert RUN.validate_json(RUN.dump_json(a_run("samba"))) == a_run("samba")


def test_a_side_runs_in_a_process_of_its_own_and_says_what_went_wrong(job: Job, tmp_path: Path) -> None:
    stage = a_stage(job, tmp_path)
    assert stage.run(replace(job, trace=a_trace(requests=4))).images == 4
    with pytest.raises(SideError, match="there is no such"):
        stage.run(replace(job, catalog=tmp_path / "there is no such catalog.yaml"))
    with pytest.raises(SideError, match="no pip"):
        stage.run(replace(job, side="ray-serve"))


def a_stage(job: Job, scratch: Path) -> Stage:
    size = Size(RECIPE, requests=24, memory_share=0.5, executors=2, threads=2, limit_s=240.0)
    machine = Machine(job.matrix, {}, 1e9, "direct")
    specs = read_stock(job.catalog)
    return Stage(size, scratch, job.catalog, specs, job.keys, machine, {}, {"ray-serve": "no pip"})


def test_costs_are_fitted_by_least_squares_and_a_batch_never_costs_less_than_nothing() -> None:
    k_s, b_s, residual = fit({size: 0.02 * size + 0.05 for size in (1, 2, 4, 8)})
    assert (k_s, b_s, residual) == (pytest.approx(0.02), pytest.approx(0.05), pytest.approx(0.0, abs=1e-9))
    k_s, b_s, _ = fit({size: 0.02 * size - 0.01 for size in (1, 2, 4, 8)})
    assert b_s == 0.0
    assert 0.015 < k_s < 0.02


def test_the_bound_is_the_slower_of_full_batches_and_bytes_that_must_move(job: Job) -> None:
    specs = read_stock(job.catalog)
    trace = job.trace
    rows = [replace(row, k_s=0.5, b_s=1.0, max_batch=1000) for row in job.matrix]
    bound = live_bound(trace, specs, rows, memory_bytes=10**12, bytes_per_s=1.0, executors=2)
    visits = trace.visits()
    assert bound.compute_s == pytest.approx((0.5 * sum(visits.values()) + len(visits)) / 2)
    assert bound.load_s == 0.0
    needed_bytes = sum(specs[ExpertId(expert)].weights_bytes for expert in visits)
    bound = live_bound(trace, specs, rows, memory_bytes=needed_bytes - 1000, bytes_per_s=1.0, executors=2)
    assert (bound.load_s, bound.images_per_s) == (1000.0, 24 / 1000.0)


def test_the_report_has_medians_shares_and_ratios_and_says_who_failed(job: Job, tmp_path: Path, capsys) -> None:
    stage = a_stage(job, tmp_path)
    sides = ("coserve", "coserve-plus", ORDINARY, NAIVE)
    comparison = Comparison(Settings(tmp_path, stage.size, sides, ("skewed",), ("paced",), rounds=3), stage)
    bound = live_bound(job.trace, stage.specs, job.matrix, memory_bytes=10**12, bytes_per_s=1.0, executors=2)
    cell = Cell("skewed", "paced", bound)
    cell.runs["coserve"] = [a_run("coserve", seconds=seconds) for seconds in (1.0, 2.0, 4.0)]
    cell.runs["coserve-plus"] = [a_run("coserve-plus", seconds=1.0)]
    cell.runs[ORDINARY] = [a_run(ORDINARY, seconds=10.0, stopped=True)]
    cell.failures[NAIVE] = "out of memory"
    comparison.cells.append(cell)
    assert comparison.failed
    row = cell.row("coserve-plus")
    assert row["images_per_s"] == 10.0
    assert row["ratio_to"] == {"coserve": 2.0, ORDINARY: 10.0, NAIVE: None, "ray-serve": None}
    assert row["share_of_bound"] == pytest.approx(10.0 / bound.images_per_s)
    comparison.show()
    shown = capsys.readouterr()
    assert all(text in shown.out for text in ("1.00*", "random weights", "530 MB/s"))
    assert "out of memory" in shown.err
    comparison.write(tmp_path / "live.json")
    assert json.loads((tmp_path / "live.json").read_text())["cells"][0]["sides"][1]["images_per_s"] == 10.0
    draw_live(comparison, tmp_path / "live.png")
    assert (tmp_path / "live.png").read_bytes().startswith(b"\x89PNG")


def test_only_sides_that_serve_images_as_they_come_are_judged_by_a_part_of_the_trace(job: Job, tmp_path: Path) -> None:
    stage = a_stage(job, tmp_path)
    short = {side for side in SIDES if stage.job(side, job.trace, "paced").limit_s == stage.size.limit_s}
    assert short == {"samba", "samba-fifo", "samba-parallel", "coserve-none", "coserve-em", ORDINARY, NAIVE}


def test_quantiles_are_values_that_occurred() -> None:
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.95)] == [1.0, 2.0, 3.0]


def test_an_unknown_side_is_wrong_use(capsys) -> None:
    with pytest.raises(SystemExit) as left:
        chosen("samba,kserve", SIDES, "--sides")
    assert left.value.code == 2
    assert "kserve" in capsys.readouterr().err
    assert chosen("coserve-plus, samba", SIDES, "--sides") == ("samba", "coserve-plus")


def test_ordinary_models_leave_when_they_are_evicted(stock: Path) -> None:
    specs = read_stock(stock)
    first, second = (specs[ExpertId(name)] for name in ("part-000", "part-001"))
    pool = ModulePool(OrdinaryFiles(CachedReader()), first.weights_bytes)
    pool.load(first)
    pool.load(second, evict=(first.expert,))
    assert pool.resident() == (second.expert,)


def _size(payload: bytes) -> tuple[int, int]:
    from PIL import Image

    return Image.open(io.BytesIO(payload)).size
