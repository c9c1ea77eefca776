"""torchvision and ultralytics, imported the way this program needs them; never import them directly.

torchvision's published wheel carries operators compiled for one build of torch; beside any other build (CPU only, for
one) its import fails outright. ultralytics sends analytics, looks up hosts, downloads, installs packages and changes
its process (threads, printing, environment): here it may not.
"""

import functools
import importlib
import importlib.machinery
import importlib.util
import os
import tempfile
import threading
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

_import_lock = threading.RLock()

#: Switches of actions that ultralytics may not take by itself; read once, while it is imported.
_ULTRALYTICS_ENVIRONMENT = {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "YOLO_VERBOSE": "false"}
_ULTRALYTICS_OFF = ("sync", "clearml", "comet", "dvc", "mlflow", "raytune", "tensorboard", "wandb", "vscode_msg")


def torchvision() -> ModuleType:
    """Import torchvision, with `torchvision.ops.nms` working whether or not its compiled operators load."""
    with _import_lock:
        return _import_torchvision()


def ultralytics() -> ModuleType:
    """Import ultralytics: offline, silent, without side effects; after torchvision, whose NMS it then calls."""
    with _import_lock:
        _import_torchvision()
        return _import_ultralytics()


@functools.cache
def _import_torchvision() -> ModuleType:
    if _compiled_operators_load():
        return importlib.import_module("torchvision")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", _nms, "CPU")
    module = importlib.import_module("torchvision")
    # The operators vanish with the object that defined them, so the module that needs them keeps it.
    module.__dict__["_coserve_operators"] = library
    boxes = importlib.import_module("torchvision.ops.boxes")
    boxes.__dict__["_assert_has_ops"] = lambda: None
    return module


def _compiled_operators_load() -> bool:
    """Load torchvision's compiled operators, as its import does first; return False if they do not fit this torch."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "torchvision is not installed: run `make test`, which makes .venv anew", name="torchvision"
        )
    loader = (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES)
    library = importlib.machinery.FileFinder(spec.submodule_search_locations[0], loader).find_spec("_C")
    if library is None or library.origin is None:
        return False
    try:
        torch.ops.load_library(library.origin)
    except OSError:
        return False
    return True


def _nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """The CPU kernel of torchvision in NumPy: indices kept, by descending score, float32 throughout."""
    return torch.from_numpy(greedy_nms(dets.detach().float().numpy(), scores.detach().float().numpy(), iou_threshold))


def greedy_nms(boxes: NDArray[np.float32], scores: NDArray[np.float32], iou_threshold: float) -> NDArray[np.int64]:
    """boxes: (N, 4) x1 y1 x2 y2. Drop each box whose IoU with a kept, more confident one is over the threshold."""
    order = np.argsort(-scores, kind="stable")
    x1, y1, x2, y2 = (np.ascontiguousarray(column) for column in boxes[order].T)
    areas = (x2 - x1) * (y2 - y1)
    alive = np.ones(len(order), dtype=bool)
    keep: list[int] = []
    for index in range(len(order)):
        if not alive[index]:
            continue
        keep.append(index)
        rest = slice(index + 1, None)
        width = np.minimum(x2[index], x2[rest]) - np.maximum(x1[index], x1[rest])
        height = np.minimum(y2[index], y2[rest]) - np.maximum(y1[index], y1[rest])
        overlap = np.maximum(width, 0) * np.maximum(height, 0)
        with np.errstate(invalid="ignore", divide="ignore"):  # empty boxes: 0/0 exceeds no threshold
            iou = overlap / (areas[index] + areas[rest] - overlap)
        alive[rest] &= ~(iou.astype(np.float64) > iou_threshold)
    return order[np.asarray(keep, dtype=np.int64)].astype(np.int64)


@functools.cache
def _import_ultralytics() -> ModuleType:
    environment = dict(os.environ)
    torch_threads, opencv_threads = torch.get_num_threads(), cv2.getNumThreads()
    print_options, open_image = np.get_printoptions(), Image.open
    # These stay set, for child processes (data loaders, trainings): they import ultralytics afresh.
    settings = {"YOLO_CONFIG_DIR": str(_settings_folder()), **environment, **_ULTRALYTICS_ENVIRONMENT}
    os.environ.update({name: settings[name] for name in ("YOLO_CONFIG_DIR", *_ULTRALYTICS_ENVIRONMENT)})
    try:
        module = importlib.import_module("ultralytics")
        _forbid_downloads()
        importlib.import_module("ultralytics.nn.tasks")
        module.__dict__["settings"].update(dict.fromkeys(_ULTRALYTICS_OFF, False))
    finally:
        for name in [name for name, value in os.environ.items() if value != settings.get(name)]:
            os.environ.pop(name)
            if name in settings:
                os.environ[name] = settings[name]
        torch.set_num_threads(torch_threads)
        torch.set_printoptions(profile="default")
        cv2.setNumThreads(opencv_threads)
        np.set_printoptions(**print_options)
        Image.open = open_image
    return module


def _forbid_downloads() -> None:
    """Refuse fonts, weights, data sets and addresses; call this before anything binds these names."""

    def refuse(*_args: object, url: object = "a file", **_kwargs: object) -> None:
        raise FileNotFoundError(f"ultralytics wanted to download {url}; downloads are off, name an existing file")

    def is_url(url: str | Path, check: bool = False) -> bool:
        return not check and str(url).startswith(("http://", "https://"))

    downloads = importlib.import_module("ultralytics.utils.downloads").__dict__
    downloads["safe_download"], downloads["is_url"] = refuse, is_url


def _settings_folder() -> Path:
    cache = os.environ.get("CACHE_DIRECTORY") or os.environ.get("XDG_CACHE_HOME")
    folder = Path(cache) if cache else Path.home() / ".cache"
    folder = folder / "coserve" / "ultralytics"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="coserve-ultralytics-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="coserve-ultralytics-"))
