"""Long work on a real Ray cluster of two PCs on loopback: the results of one PC, whoever dies and whoever stops it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil
import pytest
import torch
import yaml

from tests.contract.client import Line
from tests.contract.cluster import RayCluster
from tests.lines import COSERVE_RUN, a_jpeg
from tests.ports import free_port
from tests.tools.run_commands import coserve
from tests.waiting import until
from tools.training import fit
from tools.training.backbone import write_backbone
from tools.training.classifier import TrainingPlan
from tools.training.everything import train_each, type_folders

pytestmark = pytest.mark.test_all

RULES = """\
boards:
  free: {extras: allow, components: {P: 1, Q: 1}}
classifiers:
  "*": {expert: "{component}", pass: [ok], review_below: 0.0}
"""
TYPES = ("C0603", "LED", "R0402")
#: So few images are one task, so that there are several.
FEW = "from tools.query import rejudge\nrejudge._GROUP = 4\n"
#: Holds every process of the cluster until its input ends.
BUSY = """
import os, pathlib, sys
from daemon.cluster.joining import join, ray_environment
os.environ.update(ray_environment(pathlib.Path(sys.argv[2])))
import ray
join(ray, sys.argv[1])
@ray.remote(num_cpus=1)
class Process:
    def start(self): pass
processes = [Process.remote() for _ in range(int(ray.cluster_resources()["CPU"]))]
ray.get([process.start.remote() for process in processes])
while ray.available_resources().get("CPU", 0): pass
print("all are busy", flush=True)
sys.stdin.read()
"""
#: The command is of another version than the workers.
OTHER = "from tools.cluster import work\nwork.work_version = lambda: '9.9.9'\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    folder = Path(tempfile.mkdtemp(prefix="lw", dir="/tmp"))  # Ray's sockets need a short path
    cluster = RayCluster(folder)
    try:
        cluster.head.start()
        cluster.worker.start()
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, version_folders: tuple[Path, Path], cluster: RayCluster) -> Line:
    """A line that judged twelve images and stopped, and whose configuration names the cluster."""
    keep = {"retention": {"keep": ["pass", "fail", "review", "unknown"]}}
    folder = tmp_path_factory.mktemp("judged") / "line"
    line = Line(folder, version_folders[0], RULES, COSERVE_RUN, memory="100MB", **keep)
    with line.service():
        for number in range(12):
            line.send(a_jpeg(number), board={"type": "free", "serial": "S1"}, component="PQ"[number % 2])
        line.idle()
        line.wait(lambda: line.rows("SELECT count(*) FROM inspections WHERE image_path IS NULL") == [(0,)])
    (picture,) = line.rows("SELECT image_path FROM inspections ORDER BY inspection_id DESC LIMIT 1")
    (folder / "images").parent.joinpath(picture[0]).unlink()
    config = yaml.safe_load(line.config.read_text(encoding="utf-8"))
    line.config.write_text(yaml.safe_dump(config | {"cluster": cluster.settings}), encoding="utf-8")
    return line


def begun(home: Path, *words: object, patch: str = "") -> subprocess.Popen[str]:
    """Begin a command in a process of its own, whose answers are kept in `home`."""
    code = "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored behind `&`
    code += f"{patch}from tools.cli.main import main\nmain()\n"
    command = [sys.executable, "-c", code, *map(str, words)]
    environ = os.environ | {"HOME": str(home), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def ended(process: subprocess.Popen[str], status: int = 0) -> Any:
    """Return the JSON that the command printed, or what it said where it failed."""
    output, said = process.communicate(timeout=300)
    assert process.returncode == status, said
    return json.loads(output) if output else said


def kept(home: Path) -> list[Path]:
    return list((home / ".cache" / "coserve" / "long-work").glob("[!.]*"))


def test_images_are_judged_again_as_here_and_a_command_that_was_stopped_goes_on(
    tmp_path: Path, line: Line, version_folders: tuple[Path, Path]
):
    words = (
        "rejudge",
        line.config,
        "--json",
        "--expert",
        f"P={version_folders[1]}",
        "--rules",
        line.folder / "rules.yaml",
    )
    expected = json.loads(coserve(*words, status=1).stdout)
    assert (expected["rejudged"], expected["changed"], expected["unread"]) == (
        11,
        6 if expected["changed"] == 6 else 5,
        1,
    )
    first = begun(tmp_path, *words, "--cluster", patch=FEW)
    until(lambda: bool(kept(tmp_path)), lambda: "no answer was kept")
    first.send_signal(signal.SIGINT)
    assert "stopped by Ctrl-C" in ended(first, status=1)
    (answer, *_) = kept(tmp_path)
    verdicts = json.loads(answer.read_text(encoding="utf-8"))["verdicts"]
    answer.write_text(json.dumps({"verdicts": [["review", None, None] for _ in verdicts]}), encoding="utf-8")
    second = ended(begun(tmp_path, *words, "--cluster", patch=FEW), status=1)
    assert sum(row["to"] == "review" and row["images"] for row in second["changes"]) == 4, "it was judged once more"
    assert not kept(tmp_path), "answers stay after the end"
    assert ended(begun(tmp_path, *words, "--cluster", patch=FEW), status=1) == expected


def test_an_expert_is_measured_as_here(tmp_path: Path, line: Line):
    images = tmp_path / "images"
    images.mkdir()
    for seed in range(9):
        (images / f"{seed}.jpg").write_bytes(a_jpeg(seed))
    (images / "notes.txt").write_text("not an image", encoding="utf-8")
    words = ("experts", "measure", "P", images, "--config", line.config, "--json")
    expected = json.loads(coserve(*words).stdout)
    assert ended(begun(tmp_path, *words, "--cluster")) == expected
    refused = ended(begun(tmp_path, *words, "--cluster", patch=OTHER), status=1)
    assert "has CoServe " in refused
    assert "this PC 9.9.9: install the same on both" in refused
    assert refused.startswith(("coserve: head", "coserve: pc2"))


def test_a_command_that_finds_no_free_process_says_that_it_waits_for_one(tmp_path: Path, line: Line):
    settings = yaml.safe_load(line.config.read_text(encoding="utf-8"))["cluster"]
    other = subprocess.Popen(
        [sys.executable, "-c", BUSY, settings["address"], settings["token"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdin is not None
    assert other.stdout is not None
    images = tmp_path / "images"
    images.mkdir()
    (images / "1.jpg").write_bytes(a_jpeg(1))
    try:
        assert other.stdout.readline() == b"all are busy\n"
        waiting = begun(tmp_path, "experts", "measure", "P", images, "--config", line.config, "--json", "--cluster")
        assert waiting.stderr is not None
        said = f"all processes of the workers at {settings['address']} are busy with other work: waiting for a free one"
        assert said in iter(lambda: waiting.stderr.readline().strip(), "")
        other.stdin.close()
        assert ended(waiting)["expert"] == "P"
    finally:
        other.kill()
        other.stdout.close()
        other.wait()


def a_training_folder(root: Path) -> Path:
    for number, name in enumerate(TYPES):
        for label, colour in (("ok", (40, 60, 220)), ("bad", (220, 60, 40))):
            (root / name / label).mkdir(parents=True)
            for seed in range(5):
                noise = np.random.default_rng(100 * number + seed).normal(0, 40, (32, 32, 3))
                picture = np.clip(np.asarray(colour) + noise, 0, 255).astype(np.uint8)
                cv2.imwrite(str(root / name / label / f"{seed}.png"), picture)
    (root / "SOT23" / "ok").mkdir(parents=True)
    return root


def catalog_of(out: Path) -> Any:
    return yaml.safe_load((out / "catalog.yaml").read_text(encoding="utf-8"))


def test_experts_are_trained_as_here_though_a_pc_dies(tmp_path: Path, line: Line, cluster: RayCluster):
    pictures, here, there = a_training_folder(tmp_path / "training"), tmp_path / "here", tmp_path / "there"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    entry = write_backbone(fit.new_network("resnet18", 1), "resnet18", 32, there, "backbone")
    (there / "catalog.yaml").write_text(yaml.safe_dump({"experts": {"backbone": entry}}), encoding="utf-8")
    shutil.copytree(there, here)
    plan = TrainingPlan(fit.Schedule(12), 1, kinds=("head",))
    reports = train_each(type_folders(pictures), here, plan, lambda _: None)
    words = ("train", "all", pictures, "--out", there, "--tries", "head", "--threads", "1", "--json")
    process = begun(tmp_path, *words, "--cluster", "--config", line.config)
    until(lambda: computes(cluster), lambda: "the other PC was not used")
    cluster.worker.kill()
    output, said = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"SOT23: {reports[-1].error}" in " ".join(said.split())
    rows = {row["expert"]: row["figures"] for row in json.loads(output)["experts"]}
    times = {"image_ms", "seconds"}
    for report in reports[:-1]:
        assert report.figures is not None
        assert rows[report.expert].items() - {(name, rows[report.expert][name]) for name in times} == {
            (name, value) for name, value in report.figures.items() if name not in times
        }
    assert catalog_of(there) == catalog_of(here)
    assert sorted(file.name for file in (there / "reports").iterdir()) == sorted(
        file.name for file in (here / "reports").iterdir()
    )
    for name in TYPES:
        assert (there / f"{name}.safetensors").read_bytes() == (here / f"{name}.safetensors").read_bytes()
    again = train_each(type_folders(pictures), there, plan, lambda _: None)
    assert [report.is_kept for report in again] == [True, True, True, False]


def computes(cluster: RayCluster) -> bool:
    """Return True while the other PC does a task."""
    assert cluster.worker.process is not None
    try:
        below = psutil.Process(cluster.worker.process.pid).children(recursive=True)
        return any("carry_out" in " ".join(process.cmdline()) for process in below)
    except psutil.NoSuchProcess:  # one of them has just ended
        return False


def test_a_cluster_that_is_not_there_is_named_with_the_way_without_it(tmp_path: Path, line: Line):
    config = tmp_path / "coserve.yaml"
    shutil.copy(line.config, config)
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    address = f"127.0.0.1:{free_port()}"
    config.write_text(yaml.safe_dump(settings | {"cluster": {"address": address}}), encoding="utf-8")
    words = ("rejudge", config, "--cluster")
    said = ended(begun(tmp_path, *words), status=1)
    assert f"no cluster answers at {address}" in said
    assert "without --cluster this PC does the work alone" in said
    config.write_text(yaml.safe_dump(settings | {"cluster": {}}), encoding="utf-8")
    assert "has no `cluster: {address: …}`" in ended(begun(tmp_path, *words), status=2)
