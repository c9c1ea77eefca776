"""Names that come from outside never lead outside: catalog files, sources and ids (SQL: ruff's S608)."""

import os
import re
from pathlib import Path

import pytest
import yaml

from daemon.check import check_line
from daemon.config.settings import load_config
from daemon.errors import ConfigError
from daemon.line.line import load_rules_and_catalog
from daemon.storage.quarantine import Quarantine
from tests.lines import a_line


def a_line_whose_catalog_names(folder: Path, experts: Path, file: str, weights: str | None = None) -> Path:
    config = a_line(folder / "line", experts, **({"security": {"weights": [weights]}} if weights else {}))
    catalog_file = folder / "line" / "experts" / "catalog.yaml"
    catalog = yaml.safe_load(catalog_file.read_text())
    catalog["experts"]["R0402"]["file"] = file
    catalog_file.write_text(yaml.safe_dump(catalog))
    return config


def refusal(config: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_rules_and_catalog(load_config(config))
    assert any("lies outside the catalog's folder" in str(problem) for problem in check_line(config)[0])
    return str(caught.value)


@pytest.mark.promise(
    "Prepared files",
    "names: source, id, serial, component | `../../etc/…`, SQL | file names are encoded and truncated, stored "
    "images are named by number, SQL values are bound",
)
@pytest.mark.promise(
    "Prepared files",
    "catalog | a path or a link that leads elsewhere | weights must be in the catalog's folder or in one that "
    "`security.weights` names; any other file is refused unopened",
)
@pytest.mark.parametrize("file", ["../elsewhere/R0402.safetensors", "sub/../../elsewhere/R0402.safetensors"])
def test_a_weights_file_outside_the_catalogs_folder_is_refused_with_its_line(
    tmp_path: Path, experts_folder: Path, file: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    os.link(experts_folder / "R0402.safetensors", tmp_path / "elsewhere" / "R0402.safetensors")
    config = a_line_whose_catalog_names(tmp_path, experts_folder, file)
    assert re.search(r"catalog\.yaml:\d+:\d+: .*security\.weights", refusal(config))


def test_an_absolute_path_and_a_link_lead_nowhere_else_either(tmp_path: Path, experts_folder: Path) -> None:
    outside = tmp_path / "R0402.safetensors"
    os.link(experts_folder / "R0402.safetensors", outside)
    config = a_line_whose_catalog_names(tmp_path, experts_folder, str(outside))
    refusal(config)
    catalog = tmp_path / "line" / "experts" / "catalog.yaml"
    catalog.write_text(catalog.read_text().replace(str(outside), "linked.safetensors"))
    (tmp_path / "line" / "experts" / "linked.safetensors").symlink_to(outside)
    refusal(config)


def test_a_folder_that_the_configuration_names_may_hold_weights(tmp_path: Path, experts_folder: Path) -> None:
    (tmp_path / "line" / "shared").mkdir(parents=True)
    os.link(experts_folder / "R0402.safetensors", tmp_path / "line" / "shared" / "R0402.safetensors")
    config = a_line_whose_catalog_names(tmp_path, experts_folder, "../shared/R0402.safetensors", weights="shared")
    _, catalog = load_rules_and_catalog(load_config(config))
    assert len(catalog.headers) == 4


def test_a_catalog_folder_that_is_itself_a_link_is_no_mistake(tmp_path: Path, experts_folder: Path) -> None:
    config = a_line(tmp_path / "line", experts_folder)
    (tmp_path / "line" / "experts").rename(tmp_path / "disk-2")
    (tmp_path / "line" / "experts").symlink_to(tmp_path / "disk-2")
    _, catalog = load_rules_and_catalog(load_config(config))
    assert len(catalog.headers) == 4


@pytest.mark.promise(
    "Access, pages and reviews",
    "File paths stay in their folders; ruff (S608) refuses SQL put together from text where no person marked it",
)
@pytest.mark.parametrize(
    "name", ["../../../etc/cron.d/x", "/etc/passwd", "..", ".", "a/../../b", "a//b", ":", "-rf", "x" * 128, "./" * 64]
)
def test_sources_and_ids_never_leave_the_quarantine(tmp_path: Path, name: str) -> None:
    quarantine = Quarantine(tmp_path / "inner" / "quarantine", 10**6)
    kept = [quarantine.keep(name, "id", b"bytes", "test"), quarantine.keep("source", name, b"bytes", "test")]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(files) == sorted(path for path in kept if path)
    assert {path.parent for path in files} == {tmp_path / "inner" / "quarantine"}
    assert all(re.fullmatch(r"\d{8}T\d{15}-.*\.bin", path.name) for path in files)
