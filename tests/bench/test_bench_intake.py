"""The intake benchmark, small: real daemon, real sockets, a real disk."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.bench import image_cost
from tests.bench.intake import register

pytestmark = pytest.mark.test_all


def run(*words: str):
    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)
    return CliRunner().invoke(app, ["intake", *words])


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Sockets lie in it, and the path of one has 107 bytes at the most."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.test_all
def test_accepted_images_stand_beside_the_raw_disk_and_a_steady_rate_beside_inference(short_path: Path):
    result = run(
        *("--kilobytes", "20", "--seconds", "0.5", "--rounds", "1", "--rate", "50", "--executors", "1"),
        *("--no-delayed", "--folder", str(short_path), "--json"),
    )
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    (flood,) = report["floods"]
    assert flood["image_bytes"] == 20_000
    assert flood["accepted_per_s"] > 0
    assert flood["share"] == pytest.approx(flood["accepted_per_s"] / flood["raw_per_s"], abs=0.001)
    idle, saturated = report["steady"]
    assert (idle["beside"], saturated["beside"]) == ("idle", "saturated")
    assert idle["p99_ms"] >= idle["p50_ms"] > 0
    assert saturated["inference_kept"] > 0
    assert not list(short_path.iterdir())


@pytest.mark.test_all
def test_the_processor_time_of_an_image_is_told_thread_by_thread():
    app = typer.Typer()
    image_cost.register(app)
    app.callback()(lambda: None)
    result = CliRunner().invoke(
        app, ["image-cost", "--rates", "50", "--seconds", "1.5", "--rounds", "1", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.stderr
    (cost,) = json.loads(result.stdout)["costs"]
    assert {"writer", "intake", "journal"} <= set(cost["threads_ms"])
    assert 0 < cost["threads_ms"]["writer"] < cost["total_ms"]
