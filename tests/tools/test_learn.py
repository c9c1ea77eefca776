"""The parts of `coserve learn` that need no training."""

from pathlib import Path
from typing import Any

import pytest
import torch

from experts.catalog import CatalogFile, resolve
from experts.spec import ExpertId
from experts.versions import Versions
from tests.contract.test_families_live import put_heads, write_heads
from tools.experts.line import ExpertsLine
from tools.learn import _offer_backbone
from tools.training.backbone import load_backbone, write_backbone
from tools.training.fit import new_network

pytestmark = pytest.mark.test_all


def test_a_head_learns_on_its_own_backbone_also_when_the_line_has_a_newer_one(tmp_path: Path):
    folder, out = tmp_path / "experts", tmp_path / "catalog.yaml"
    folder.mkdir()
    (folder / "catalog.yaml").write_text("experts: {}\n", encoding="utf-8")
    entries: dict[str, Any] = write_heads(folder)
    put_heads(folder, entries)
    torch.manual_seed(8)
    put_heads(folder, {"line": write_backbone(new_network("resnet18", 3).eval(), "resnet18", 64, folder, "line")})
    versions = Versions(folder / "catalog.yaml")
    in_force = {name: expert.in_force for name, expert in versions.read().items() if expert.in_force}
    catalog, problems = resolve(CatalogFile(experts=in_force), folder)
    assert not problems
    line = ExpertsLine(tmp_path / "coserve.yaml", None, versions)  # type: ignore[arg-type]
    _offer_backbone(line, catalog[ExpertId("R0402")], out)
    offered = load_backbone(out, None)
    assert offered is not None
    assert offered.entry.sha256 == entries["line"]["sha256"]
    offered.network()
