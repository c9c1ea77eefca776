"""`coserve plant demo`: three real lines, their hub on a real PostgreSQL, a decision at a line that the hub shows."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from experts.catalog import CatalogEntry, write_catalog
from routing_rules.compile import ExpertLabels, compile_rules
from routing_rules.load import read_yaml
from tests import ROOT
from tests.daemon.storage.database.postgresql_server import WANTED, programs
from tests.waiting import PATIENCE_S, until
from tools.camera.render import board_types, part_types
from tools.cli.main import app
from tools.demo.judge import Quality
from tools.demo.prepare import PREPARED, PrepareReport, code_key, write_quick_rules
from tools.demo.training import BACKBONE, CLASSIFIER, CLASSIFIER_SIZE
from tools.training import fit
from tools.training.backbone import write_backbone
from tools.training.head import write_head

pytest.importorskip("psycopg", reason=WANTED)
pytestmark = pytest.mark.skipif(programs() is None, reason=WANTED)
#: On each board of the demo, twice: its classifier sees nothing but missing parts.
_ALWAYS_MISSING = "C0805"


def prepared_experts(folder: Path) -> None:
    """Make what a quick training would have made: heads that answer the same whatever they see."""
    (folder / "experts").mkdir(parents=True)
    backbone = write_backbone(
        fit.new_network(CLASSIFIER, 2).eval(), CLASSIFIER, CLASSIFIER_SIZE, folder / "experts", BACKBONE
    )
    entries = {BACKBONE: backbone}
    for name, part in part_types().items():
        label = "missing" if name == _ALWAYS_MISSING else "ok"
        bias = torch.tensor([8.0 * (each == label) for each in part.labels])
        head = {"weight": torch.zeros(len(part.labels), 512), "bias": bias}
        entry = CatalogEntry.model_validate(backbone)
        entries[name] = write_head("linear", head, entry, part.labels, folder / "experts", expert=name, origin="a test")
    write_catalog(folder / "experts" / "catalog.yaml", entries)
    write_quick_rules(folder, 0.6)
    (folder / "coserve.yaml").touch()
    report = PrepareReport(code_key(quick=True), 1.5, Quality(8, 50, 30, 300, 9, {"bridge": 20}))
    (folder / PREPARED).write_text(json.dumps(asdict(report)), encoding="utf-8")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the user of PostgreSQL can reach, and with a short name, for sockets."""
    with tempfile.TemporaryDirectory(prefix="pd") as name:
        Path(name).chmod(0o755)
        yield Path(name) / "plant"


@pytest.fixture
def free_ports() -> int:
    """The first of four free ports in a row."""
    for first in range(21_700 + os.getpid() % 1000 * 4, 32_000, 4):
        with ExitStack() as stack:
            try:
                for port in range(first, first + 4):
                    stack.enter_context(closing(socket.create_server(("127.0.0.1", port))))
            except OSError:
                continue
        return first
    raise AssertionError("no four free ports in a row")


def page(address: str) -> str:
    request = urllib.request.Request(address, headers={"Accept": "text/html"})  # noqa: S310 - our own http
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:  # noqa: S310
        return answer.read().decode()


def test_a_board_goes_through_three_lines_and_the_hub_shows_its_way_and_the_decisions(
    tmp_path: Path, folder: Path, free_ports: int
) -> None:
    log = tmp_path / "log"
    prepared_experts(folder / "experts")
    command = [sys.executable, "-m", "tools", "plant", "demo", "--dir", str(folder), "--port", str(free_ports)]
    with log.open("wb") as output:
        demo = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    try:
        for news in ("hub: ", "line-1: ", "line-2: ", "line-3: ", "goes through all lines: "):
            until(lambda news=news: news in log.read_text() or demo.poll() is not None, log.read_text)
            assert demo.poll() is None, log.read_text()
        said = log.read_text()
        assert "defects caught 30 of 50 (0.600; missed: 20 bridge)" in said
        (way,) = re.findall(r"goes through all lines: (\S+)", said)[:1]
        plant = way.partition("/serial/")[0]
        until(lambda: all(page(way).count(f"line-{number}") for number in (1, 2, 3)))
        until(lambda: "demo" in page(way).partition("</header>")[2])
        assert all(name in page(plant) for name in ("line-1", "line-2", "line-3"))
        found = CliRunner().invoke(
            app, ["results", "--plant", str(folder / "plant.yaml"), "--verdict", "fail", "--json"]
        )
        assert found.exit_code == 0, found.output
        assert {row["component"] for row in json.loads(found.stdout)} == {_ALWAYS_MISSING}
        processes = psutil.Process(demo.pid).children(recursive=True)
        assert len(processes) > 4
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(PATIENCE_S) == 0, log.read_text()
        assert psutil.wait_procs(processes, PATIENCE_S)[1] == []
        assert log.read_text().rstrip().endswith(f"goes on with what {folder} has.")
    finally:
        for process in (demo, *(psutil.Process(demo.pid).children(recursive=True) if demo.poll() is None else ())):
            process.kill()


def test_quick_rules_ask_no_detector_and_name_no_defect_of_solder(tmp_path: Path) -> None:
    write_quick_rules(tmp_path, 0.7)
    labels = {name: ExpertLabels("classify", part.labels) for name, part in part_types().items()}
    routes = compile_rules(read_yaml(tmp_path / "rules.yaml"), "rules.yaml", labels)
    assert set(routes.experts) == set(labels)
    assert set(routes.recipes) == set(board_types())
