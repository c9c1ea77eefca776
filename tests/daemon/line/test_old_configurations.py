"""Files that an older release reads go on meaning what they meant."""

import json
import shutil
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon.config.settings import Config, load_config
from daemon.dispatch.trace import TraceError, read_calls, read_makeup
from daemon.errors import ConfigError
from daemon.line.line import load_catalog
from daemon.line.profile import load_profile
from experts.errors import WeightsError
from experts.weights import file_sha256, read_header
from routing_rules.compile import RulesError, compile_rules

RELEASES = sorted(path.name for path in Path(__file__).with_name("configurations").iterdir())
CONFIGURATIONS = [
    path
    for release in RELEASES
    for path in sorted(Path(__file__).with_name("configurations").glob(f"{release}/*.yaml"))
]
FORMATS = Path(__file__).with_name("formats") / "0.1.0"
MINIMAL = "rules: rules.yaml\ncatalog: experts/catalog.yaml\ndevices:\n  cpu: {expert_memory: 250MB}\n"


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def leaves(data: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(data, dict) or not data:
        return [path]
    return [leaf for key, value in data.items() for leaf in leaves(value, (*path, key))]


def at(data: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        data = data[part]
    return data


def part_of(expected: Any, actual: Any) -> bool:
    """Return True if `actual` holds all of `expected`; later versions may hold more."""
    if isinstance(expected, dict):
        return all(key in actual and part_of(value, actual[key]) for key, value in expected.items())
    if isinstance(expected, list):
        return len(expected) == len(actual) and all(map(part_of, expected, actual))
    return expected == actual


def meaning(config: Config, folder: Path) -> Any:
    text = json.dumps(config.model_dump(mode="json"))
    return json.loads(text.replace(str(folder), "{folder}"))


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=named)
def test_a_configuration_of_an_older_release_means_what_it_meant(path: Path, tmp_path: Path):
    copy = Path(shutil.copy(path, tmp_path / "coserve.yaml"))
    config = load_config(copy, {})
    expected = json.loads((path.parent / "meaning.json").read_text(encoding="utf-8"))[path.name]
    assert part_of(expected, meaning(config, tmp_path))


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=named)
def test_an_environment_variable_of_an_older_release_means_what_it_meant(path: Path, tmp_path: Path):
    """Every setting of the file as a variable, over a file that says as little as possible."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    (tmp_path / "coserve.yaml").write_text(MINIMAL, encoding="utf-8")
    environ = {
        "COSERVE_" + "_".join(leaf).upper().replace(":", "_"): json.dumps(at(data, leaf))
        for leaf in leaves(data)
        if leaf != ("models",)
    }
    config = load_config(tmp_path / "coserve.yaml", environ)
    expected = json.loads((path.parent / "meaning.json").read_text(encoding="utf-8"))[path.name]
    assert part_of(expected, meaning(config, tmp_path))


def test_this_release_has_kept_configurations_too():
    """A new version number asks for a folder of its own: `everything.yaml` with every key, and `meaning.json`."""
    assert version("coserve") in RELEASES
    assert {path.parent.name for path in CONFIGURATIONS if path.name == "everything.yaml"} == set(RELEASES)


def test_a_key_that_no_release_had_is_an_error(tmp_path: Path):
    (tmp_path / "coserve.yaml").write_text(MINIMAL + "patience: 3s\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="unknown key `patience`"):
        load_config(tmp_path / "coserve.yaml", {})


def plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(value)


@pytest.mark.parametrize("name", ["rules-minimal.yaml", "rules-mainboard.yaml", "rules-branches.yaml"])
def test_rules_of_an_older_release_route_as_they_did(name: str):
    routes = compile_rules((FORMATS / name).read_text(encoding="utf-8"), name, None)
    actual = {
        "version": routes.version,
        "recipes": routes.recipes,
        "first_steps": routes.first_steps,
        "patterns": [{"glob": pattern.glob, "step": pattern.step} for pattern in routes.patterns],
    }
    expected = json.loads((FORMATS / "rules.json").read_text(encoding="utf-8"))[name]
    assert part_of(expected, json.loads(json.dumps(actual, default=plain)))


def test_a_catalog_and_weights_of_an_older_release_are_read(tmp_path: Path):
    catalog, mistakes, unusable = load_catalog(FORMATS / "catalog.yaml")
    assert catalog is not None
    assert [*mistakes, *unusable] == []
    assert list(catalog) == ["R0402", "0402"]
    assert all(spec.sha256 == file_sha256(spec.file) for spec in catalog.values())
    assert [entry.name for entry in read_header(FORMATS / "R0402.safetensors").entries] == ["conv.weight", "conv.bias"]


def test_weights_of_a_newer_format_are_refused_by_name(tmp_path: Path):
    newer = (FORMATS / "R0402.safetensors").read_bytes().replace(b'"coserve_format":"1"', b'"coserve_format":"3"')
    (tmp_path / "R0402.safetensors").write_bytes(newer)
    with pytest.raises(WeightsError, match=r"format 3.*reads formats 1 and 2"):
        read_header(tmp_path / "R0402.safetensors")


def test_a_profile_of_an_older_release_is_read_and_a_newer_one_refused(tmp_path: Path):
    profile = load_profile(FORMATS / "profile.yaml")
    assert [(row.device, row.k_s, row.max_batch) for row in profile.rows] == [("cpu", 0.05, 6)]
    newer = (FORMATS / "profile.yaml").read_text(encoding="utf-8").replace("profile: 1", "profile: 2")
    (tmp_path / "profile.yaml").write_text(newer, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"profile.yaml:1:10: expected 1"):
        load_profile(tmp_path / "profile.yaml")


@pytest.mark.parametrize("trace_format", [1, 3])
def test_a_trace_of_an_older_release_is_read_and_one_of_another_format_refused(tmp_path: Path, trace_format: int):
    assert read_makeup(FORMATS / "trace.jsonl").policy == "coserve-plus"
    assert len(list(read_calls(FORMATS / "trace.jsonl"))) == 59
    another = (FORMATS / "trace.jsonl").read_text(encoding="utf-8").replace('"trace":2', f'"trace":{trace_format}', 1)
    (tmp_path / "trace.jsonl").write_text(another, encoding="utf-8")
    with pytest.raises(TraceError, match=f"format {trace_format}, and this version reads 2"):
        read_makeup(tmp_path / "trace.jsonl")


def test_rules_and_catalogs_with_a_key_of_a_newer_release_are_refused_with_its_name(tmp_path: Path):
    (tmp_path / "catalog.yaml").write_text("experts: {}\nshards: 2\n", encoding="utf-8")
    _, mistakes, _ = load_catalog(tmp_path / "catalog.yaml")
    assert "catalog.yaml:2:1: unknown key `shards`" in str(mistakes[0])
    with pytest.raises(RulesError, match="unknown key `lanes`"):
        compile_rules((FORMATS / "rules-minimal.yaml").read_text(encoding="utf-8") + "lanes: 2\n", "rules.yaml", None)
