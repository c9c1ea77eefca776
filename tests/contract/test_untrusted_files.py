"""Files made by an attacker: no command runs anything in them unless it was told to trust them."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from daemon.check import check_line
from daemon.config.settings import load_config
from daemon.errors import ConfigError
from tests.contract.client import Line
from tests.lines import COSERVE_RUN, a_line


class Mischief:
    """Pickles as a call of the system's shell, which leaves a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.trace}",)


def malicious_models(trace: Path) -> dict[str, bytes]:
    """Return malicious files of the formats that a model may have: torch's own zip, its old format, a bare pickle."""
    formats: dict[str, bytes] = {}
    for name, zipped in (("zip", True), ("legacy", False)):
        buffer = io.BytesIO()
        content = {"model": Mischief(trace), "state_dict": Mischief(trace)}
        torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
        formats[name] = buffer.getvalue()
    formats["pickle"] = pickle.dumps(Mischief(trace))
    return formats


@pytest.mark.promise(
    "Prepared files",
    "weights | a pickled program that poses as a model | the daemon reads safetensors only, which holds plain "
    "numbers; it never unpickles. Such an expert cannot be loaded, its images are `unknown`",
)
@pytest.mark.promise("Access, pages and reviews", "A malicious model file runs nothing and costs its own images only")
def test_a_malicious_model_file_in_the_catalog_runs_nothing_and_costs_its_own_images_only(
    tmp_path: Path, torch_experts_folder: Path
) -> None:
    trace = tmp_path / "it-ran"
    line = Line(tmp_path, torch_experts_folder, command=COSERVE_RUN)
    experts = tmp_path / "experts"
    models = malicious_models(trace)
    (experts / "evil.pt").write_bytes(models["zip"])
    line.change_entry("R0402", file="evil.pt")
    line.weights("R0402").unlink()
    # The others keep their names: files that were swapped after the catalog was written.
    line.weights("QFP64").unlink()
    (experts / "QFP64.safetensors").unlink()
    (experts / "QFP64.safetensors").write_bytes(models["legacy"])
    problems, _ = check_line(line.config)
    assert any("evil.pt" in problem for problem in problems)
    assert any("QFP64.safetensors" in problem for problem in problems)
    with line.service():
        reasons = {component: line.result(line.send(component=component))["reason"] for component in "PVF"}
        assert reasons == {"P": "expert_failed", "V": None, "F": "expert_failed"}
        line.control("unload", expert="C0603")
        line.weights("C0603").unlink()
        line.weights("C0603").write_bytes(models["pickle"])
        line.control("reload")
        assert line.result(line.send(component="V"))["reason"] == "expert_failed"
    assert not trace.exists()


@pytest.mark.promise(
    "Prepared files",
    "rules, catalog, configuration | YAML that creates Python objects | a safe loader reports a mistake with its line",
)
def test_yaml_that_asks_for_python_objects_is_refused_unrun(tmp_path: Path, experts_folder: Path) -> None:
    trace = tmp_path / "it-ran"
    config = a_line(tmp_path, experts_folder)
    attack = f'!!python/object/apply:os.system ["touch {trace}"]\n'
    for file in (tmp_path / "rules.yaml", tmp_path / "experts" / "catalog.yaml", config):
        was = file.read_text()
        file.write_text(f"{was}\nattack: {attack}")
        assert check_line(config)[0] != []
        file.write_text(was)
    with pytest.raises(ConfigError, match="COSERVE_RECORD"):
        load_config(config, {"COSERVE_RECORD": attack.strip()})
    assert not trace.exists()


@pytest.mark.promise(
    "Prepared files",
    "a network for `coserve import` | a program | its weights are read, and nothing of it runs",
)
@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_importing_a_malicious_file_runs_nothing_of_it(tmp_path: Path, kind: str, name: str) -> None:
    from tools.training import TrainingError
    from tools.training.importer import import_file

    trace, file = tmp_path / "it-ran", tmp_path / name
    file.write_bytes(malicious_models(trace)[kind])
    for architecture, size in (("resnet18", 64), ("yolo11n", 64)):
        with pytest.raises(TrainingError):
            import_file(file, architecture, size, tmp_path / "experts", classes=("a", "b"))
    assert not trace.exists()
    assert not (tmp_path / "experts").exists()
