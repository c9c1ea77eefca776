"""Small real lines for tests that start daemons: real networks, random weights (nothing is asked of verdicts)."""

import io
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from experts.catalog import write_catalog
from experts.editions.weights import WeightsStore

#: `coserve run`, for `Service` and `Line`: the daemon on this PC's devices, which computes with torch.
COSERVE_RUN = ("tools", "run")
CLASSIFIERS = ("R0402", "C0603", "QFP64")
RULES = """\
boards:
  mainboard-a:
    time_limit: 10m
    components: {R0402: 2, C0603: [C1, C2], QFP64: [U1]}
  open-board:
    extras: allow
    components: {R0402: 1}
classifiers:
  "*": {expert: "{component}", pass: [ok, odd, bad], review_below: 0.0, then: solder}
detectors:
  solder: {expert: yolo-solder, fail_on: {bridge: 0.99}}
defects: {bridge: D207}
"""


def make_experts(folder: Path) -> None:
    """Three ResNet-18 classifiers and a YOLO11n detector at 64 pixels, random weights, with their catalog."""
    import torch

    from experts.vision import frameworks
    from tools.training.importer import import_model

    torch.set_num_threads(1)
    torch.manual_seed(7)
    entries: dict[str, Any] = {}
    image = np.zeros((64, 64, 3), np.uint8)
    for name in CLASSIFIERS:
        network = frameworks.torchvision().models.resnet18(num_classes=3)
        report = import_model(network, "resnet18", ["ok", "odd", "bad"], 64, folder, expert=name, images=[image])
        entries[name] = report.entry
    detector = frameworks.ultralytics().YOLO("yolo11n.yaml").model
    classes = ("bridge", "void", *(f"label{number}" for number in range(78)))
    report = import_model(detector, "yolo11n", classes, 64, folder, expert="yolo-solder", images=[image])
    entries["yolo-solder"] = report.entry
    write_catalog(folder / "catalog.yaml", entries)


def a_line(folder: Path, experts: Path, *, memory: str = "150MB", **settings: Any) -> Path:
    """A folder that `coserve run` takes; sockets and ports of its own. Weights are linked, not copied.

    They lie in the store of editions too: what a test does to the file that the catalog names, no daemon sees.
    """
    (folder / "experts").mkdir(parents=True)
    shutil.copy(experts / "catalog.yaml", folder / "experts")
    for file in experts.glob("*.safetensors"):
        os.link(file, folder / "experts" / file.name)
    link_weights(folder / "experts" / "catalog.yaml")
    (folder / "rules.yaml").write_text(RULES, encoding="utf-8")
    config: dict[str, Any] = {
        "endpoints": {
            "intake": ["ipc://run/intake.sock"],
            "results": "ipc://run/results.sock",
            "control": "ipc://run/control.sock",
        },
        "rules": "rules.yaml",
        "catalog": "experts/catalog.yaml",
        "devices": {"cpu": {"expert_memory": memory, "executors": 1}},
        # Most tests send any picture for any part, and retest at once.
        "guards": {"may_repeat": ["*"], "retest_after": "off"},
        **settings,
    }
    path = folder / "coserve.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def link_weights(catalog: Path) -> None:
    """Put the weights of a catalog where editions look for them: a first start then copies none."""
    store = WeightsStore(catalog)
    for entry in yaml.safe_load(catalog.read_text(encoding="utf-8"))["experts"].values():
        place = store.place(entry["sha256"])
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            os.link(catalog.parent / entry["file"], place)


def a_jpeg(seed: int = 0, width: int = 80, height: int = 60) -> bytes:
    """A small textured JPEG; another seed, other bytes."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height // 4, width // 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((width, height)).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


#: For the experts that `make_versions` makes: whatever they answer passes.
RULES_OF_VERSIONS = """\
boards:
  free: {extras: allow, components: {P: 100000, Q: 100000}}
classifiers:
  "*": {expert: "{component}", pass: [ok, bad], review_below: 0.0}
"""


def make_versions(first: Path, second: Path) -> None:
    """Classifiers P and Q with labels ok and bad in `first`; in `second` another P, as if trained on swapped labels."""
    import torch

    from experts.vision import frameworks

    torch.set_num_threads(1)
    entries: dict[str, Any] = {}
    states: dict[str, dict[str, Any]] = {}
    for seed, name in enumerate("PQ"):
        torch.manual_seed(seed)
        states[name] = frameworks.torchvision().models.resnet18(num_classes=2).state_dict()
        entries[name] = _small_classifier(states[name], first, name)
    write_catalog(first / "catalog.yaml", entries)
    swapped = {key: value.flip(0) if key.startswith("fc.") else value for key, value in states["P"].items()}
    write_catalog(second / "catalog.yaml", {"P": _small_classifier(swapped, second, "P")})


def _small_classifier(state: dict[str, Any], out: Path, name: str) -> dict[str, Any]:
    from experts.vision import frameworks
    from tools.training.importer import import_model

    network = frameworks.torchvision().models.resnet18(num_classes=2)
    network.load_state_dict(state)
    image = np.zeros((32, 32, 3), np.uint8)
    return import_model(network, "resnet18", ("ok", "bad"), 32, out, expert=name, images=[image]).entry
