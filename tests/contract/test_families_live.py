"""A line on real networks with heads of one backbone beside a whole classifier and a detector."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from daemon.config.settings import load_config
from daemon.dashboard.pages.experts import ExpertOverview
from daemon.dashboard.site.site import Site
from experts.catalog import CatalogEntry
from tests.contract.client import Line, everything_is_whole
from tests.lines import COSERVE_RUN
from tests.tools.run_commands import coserve
from tools.training.backbone import write_backbone
from tools.training.fit import new_network
from tools.training.head import write_head

pytestmark = pytest.mark.test_all

LABELS = ("ok", "odd", "bad")


def write_heads(folder: Path, seed: int = 1) -> dict[str, Any]:
    """Return the catalog's entries of a backbone and of R0402 and C0603 as heads of it, with random weights."""
    torch.manual_seed(7)
    backbone = write_backbone(new_network("resnet18", 3).eval(), "resnet18", 64, folder, "line")
    entries = {"line": backbone}
    torch.manual_seed(seed)
    for name in ("R0402", "C0603"):
        tensors = {"weight": torch.randn(3, 512), "bias": torch.zeros(3)}
        entry = CatalogEntry.model_validate(backbone)
        entries[name] = write_head("linear", tensors, entry, LABELS, folder, expert=name, origin="test")
    return entries


def put_heads(folder: Path, entries: dict[str, Any]) -> None:
    document = yaml.safe_load((folder / "catalog.yaml").read_text(encoding="utf-8"))
    document["experts"] |= entries
    (folder / "catalog.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")


def test_heads_whole_networks_and_detectors_share_a_line(tmp_path: Path, torch_experts_folder: Path) -> None:
    line = Line(tmp_path, torch_experts_folder, command=COSERVE_RUN, memory="150MB")
    for name in ("R0402", "C0603"):
        (tmp_path / "experts" / f"{name}.safetensors").unlink()  # links to the session's files
    put_heads(tmp_path / "experts", write_heads(tmp_path / "experts"))
    with line.service():
        numbers = [line.send(component="PVF"[number % 3]) for number in range(24)]
        line.idle()
        resident = {row["expert"]: row["resident"] for row in line.control("experts")["experts"]}
        assert resident["R0402"] == resident["C0603"] == resident["line"] != []
        assert not line.log().count("expert_load_failed")
        site = Site(load_config(tmp_path / "coserve.yaml"))
        listed = {row["expert"]: (row["health"], row["answers"]) for row in ExpertOverview(site).listing()[0]}
        site.database.close()
    assert len(numbers) == 24
    assert listed["line"] == ("OK", 16), "a backbone is used as often as its heads"
    assert listed["R0402"] == listed["C0603"] == ("OK", 8)
    assert line.rows("SELECT count(*) FROM inspections WHERE verdict <> 'unknown'") == [(24,)]
    stages = line.rows("SELECT expert, expert_version, count(*), max(batch_size) FROM stages GROUP BY expert")
    versions = {expert: version for expert, version, _, _ in stages}
    assert {expert: count for expert, _, count, _ in stages if expert != "yolo-solder"} == dict.fromkeys(
        ("R0402", "C0603", "QFP64"), 8
    )
    assert len(set(versions.values())) == 4
    mixed = line.rows(
        "SELECT count(*) FROM (SELECT batch_id FROM stages GROUP BY batch_id HAVING count(DISTINCT expert) > 1)"
    )
    assert mixed[0][0] > 0, "one batch held two component types"
    loads = [loaded for (loaded,) in line.rows("SELECT loaded FROM expert_switches")]
    assert sum(loaded.startswith("line@") for loaded in loads) == 1
    assert not {"R0402", "C0603"} & set(loads)
    everything_is_whole(line)
    config = str(tmp_path / "coserve.yaml")
    again = coserve("rejudge", config, "--json")
    assert json.loads(again.stdout)["changed"] == 0, "heads answer offline as they do in the daemon"
    coserve("experts", "verify", "--config", config, "--forward", "--json")
    coserve("check", config)
    measured = coserve("experts", "measure", "line", tmp_path, "--config", config, status=1)
    assert measured.stdout == ""
    assert "line is a backbone, which gives no answers: measure its heads" in measured.stderr
    taught = coserve("learn", "line", "--config", config, status=1)
    assert "line is a backbone: the experts that are heads on it learn" in taught.stderr
