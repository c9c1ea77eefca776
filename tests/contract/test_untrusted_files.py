"""Files that somebody prepared: nothing in them is ever run, by no command that does not ask to trust them."""

import ast
import contextlib
import io
import os
import pickle
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from coserve_client import CameraImage, Publisher, publish_images
from daemon.check import check_line
from daemon.config.settings import load_config
from daemon.errors import ConfigError
from daemon.wire.control import ControlError, ask
from tests import ROOT
from tests.lines import a_jpeg, a_line
from tests.waiting import PATIENCE_S
from tools.setup.service import Service


class Mischief:
    """Pickles as a call of the system's shell, which leaves a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.trace}",)


def malicious_models(trace: Path) -> dict[str, bytes]:
    """What a file that calls itself a model may be: torch's own zip, its old format, a bare pickle."""
    formats: dict[str, bytes] = {}
    for name, zipped in (("zip", True), ("legacy", False)):
        buffer = io.BytesIO()
        content = {"model": Mischief(trace), "state_dict": Mischief(trace)}
        torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
        formats[name] = buffer.getvalue()
    formats["pickle"] = pickle.dumps(Mischief(trace))
    return formats


def test_a_malicious_model_file_in_the_catalog_runs_nothing_and_costs_its_own_images_only(
    tmp_path: Path, torch_experts_folder: Path
) -> None:
    trace = tmp_path / "it-ran"
    config = a_line(tmp_path, torch_experts_folder)
    models = malicious_models(trace)
    catalog_file = tmp_path / "experts" / "catalog.yaml"
    catalog = yaml.safe_load(catalog_file.read_text())
    (tmp_path / "experts" / "evil.pt").write_bytes(models["zip"])
    catalog["experts"]["R0402"]["file"] = "evil.pt"
    # The others keep their names: files that were swapped after the catalog was written.
    (tmp_path / "experts" / "QFP64.safetensors").unlink()
    (tmp_path / "experts" / "QFP64.safetensors").write_bytes(models["legacy"])
    catalog_file.write_text(yaml.safe_dump(catalog))
    problems, _ = check_line(config)
    assert any("evil.pt" in problem for problem in problems)
    assert any("QFP64.safetensors" in problem for problem in problems)
    control, board = f"ipc://{tmp_path}/run/control.sock", {"type": "open-board", "serial": "S1"}
    images = [CameraImage(f"S1/{n}", a_jpeg(n), board, c, {}) for n, c in enumerate(("R0402", "C0603", "QFP64"))]
    with Service(config, tmp_path / "daemon.log"):
        with Publisher(f"ipc://{tmp_path}/run/intake.sock", "camera") as publisher:
            assert publish_images(publisher, images).accepted == 3
        until_s = time.monotonic() + 2 * PATIENCE_S
        while ask(control, "status", timeout_s=PATIENCE_S)["completed"] < 3:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        (tmp_path / "experts" / "C0603.safetensors").unlink()
        (tmp_path / "experts" / "C0603.safetensors").write_bytes(models["pickle"])
        ask(control, "reload", timeout_s=PATIENCE_S)
        with contextlib.suppress(ControlError):
            ask(control, "pin", expert="C0603", timeout_s=60)
        with Publisher(f"ipc://{tmp_path}/run/intake.sock", "camera") as publisher:
            assert publish_images(publisher, [CameraImage("S1/3", a_jpeg(3), board, "C0603", {})]).accepted == 1
        while ask(control, "status", timeout_s=PATIENCE_S)["completed"] < 4:
            assert time.monotonic() < until_s
            time.sleep(0.05)
    with closing(sqlite3.connect(tmp_path / "inspection.db")) as database:
        query = "SELECT component, verdict = 'unknown', reason FROM inspections ORDER BY inspection_id LIMIT 3"
        rows = database.execute(query).fetchall()
    assert rows == [("R0402", 1, "expert_failed"), ("C0603", 0, None), ("QFP64", 1, "expert_failed")]
    assert not trace.exists()


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


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.safetensors"])
def test_importing_a_malicious_file_runs_nothing_unless_it_is_trusted(tmp_path: Path, kind: str, name: str) -> None:
    from tools.training.expert_file import ImportRefusedError
    from tools.training.importer import ImportTarget, import_file

    trace, file = tmp_path / "it-ran", tmp_path / name
    file.write_bytes(malicious_models(trace)[kind])
    for architecture, size in (("resnet18", 64), ("yolo11n", 64)):
        with pytest.raises(ImportRefusedError):
            import_file(file, ImportTarget(architecture, size, tmp_path / "experts", classes=("a", "b")))
    assert not trace.exists()
    assert not (tmp_path / "experts").exists()


# What the daemon's own code may not call

_FORBIDDEN_CALLS = {
    "eval": "runs text", "exec": "runs text", "compile": "runs text", "__import__": "imports by name",
    "os.system": "a shell", "os.popen": "a shell", "os.execv": "another program", "os.execvp": "another program",
    "pickle.load": "unpickles", "pickle.loads": "unpickles", "torch.load": "unpickles", "numpy.load": "may unpickle",
    "np.load": "may unpickle", "yaml.load": "makes objects", "yaml.unsafe_load": "makes objects",
    "yaml.full_load": "makes objects", "marshal.loads": "runs code", "shelve.open": "unpickles",
    "torch.hub.load": "downloads", "torch.jit.load": "runs code", "urllib.request.urlopen": "goes out",
    "socket.create_connection": "goes out",
}  # fmt: skip
_FORBIDDEN_IMPORTS = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "requests", "urllib.request",
                      "http.client", "ftplib", "smtplib", "xmlrpc", "code", "runpy"}  # fmt: skip


def dotted(node: ast.expr) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{dotted(node.value)}.{node.attr}"
        case _:
            return "?"


@pytest.mark.parametrize("room", ["daemon", "experts", "routing_rules"])
def test_the_daemons_code_calls_nothing_that_runs_what_it_reads(room: str) -> None:
    found: list[str] = []
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call):
                name = dotted(node.func)
                if name in _FORBIDDEN_CALLS:
                    found.append(f"{where}: {name} {_FORBIDDEN_CALLS[name]}")
                if "subprocess" in name and any(word.arg == "shell" for word in node.keywords):
                    found.append(f"{where}: {name} starts a shell")
                if name.endswith("connect") and node.args and "tcp" in ast.dump(node.args[0]):
                    found.append(f"{where}: {name} goes out over the network")
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{where}: imports {name}" for name in names if name in _FORBIDDEN_IMPORTS]
    assert found == []
