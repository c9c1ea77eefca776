"""The networks of `coserve bench compute` as OpenVINO runs them best: compiled for one batch size, pixels included."""

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from experts.spec import ExpertSpec
from tests.bench.live.libraries import FirstOutput

PACKAGES = ("openvino", "nncf")
#: OpenVINO's names of precisions, by ours. Eight bits need the package `nncf`, which quantises weights and activations.
PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32"}


@dataclass(frozen=True, slots=True)
class OpenVinoNetwork:
    """`network` answers (B, 3, S, S) float32, `from_pixels` (B, S, S, 3) uint8; both with the first output."""

    network: Callable[[NDArray[np.float32]], torch.Tensor]
    from_pixels: Callable[[NDArray[np.uint8]], torch.Tensor]


def missing_packages() -> list[str]:
    """Return the packages that OpenVINO's rows need and that are not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


def openvino_networks(
    original: nn.Module, spec: ExpertSpec, pixels: NDArray[np.uint8], threads: int
) -> dict[str, OpenVinoNetwork]:
    """Return a framework's model, compiled for the batch `pixels` (B, S, S, 3), for each precision that it has here."""
    missing = missing_packages()
    if "openvino" in missing:
        return {}
    openvino: Any = import_module("openvino")
    core = openvino.Core()
    precisions = [name for name in PRECISIONS if name != "int8" or "nncf" not in missing]
    if "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        precisions.remove("bfloat16")
    networks: dict[str, OpenVinoNetwork] = {}
    for precision in precisions:
        model = _converted(openvino, original, spec, pixels.shape)
        if precision == "int8":
            model = _quantised(model, spec, pixels)
        settings = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[precision],
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
        }
        network = _running(core.compile_model(model, "CPU", settings))
        with_pixels = core.compile_model(_taking_pixels(openvino, model, spec), "CPU", settings)
        networks[precision] = OpenVinoNetwork(network, _running(with_pixels))
    return networks


def _converted(openvino: Any, original: nn.Module, spec: ExpertSpec, shape: Sequence[int]) -> Any:
    count, side = shape[0], shape[1]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # tracing warns of YOLO's own checks
        network = FirstOutput(original, is_list=spec.task == "detect")
        images = torch.zeros(count, 3, side, side)
        network(images)  # YOLO's head notes its anchors at the first batch of a size, which must not be traced
        model = openvino.convert_model(network, example_input=images)
    model.reshape([count, 3, side, side])
    return model


def _quantised(model: Any, spec: ExpertSpec, pixels: NDArray[np.uint8]) -> Any:
    images = (pixels.astype(np.float32) / 255 - np.array(spec.mean, np.float32)) / np.array(spec.std, np.float32)
    with redirect_stdout(StringIO()):  # it draws progress bars and names its own version
        nncf: Any = import_module("nncf")
        logging.getLogger("nncf").setLevel(logging.ERROR)
        return nncf.quantize(model, nncf.Dataset([images.transpose(0, 3, 1, 2)]), subset_size=1)


def _taking_pixels(openvino: Any, model: Any, spec: ExpertSpec) -> Any:
    steps = openvino.preprocess.PrePostProcessor(model)
    given = steps.input(0)
    given.tensor().set_element_type(openvino.Type.u8).set_layout(openvino.Layout("NHWC"))
    given.model().set_layout(openvino.Layout("NCHW"))
    change = given.preprocess().convert_element_type(openvino.Type.f32)
    change.mean([255 * value for value in spec.mean]).scale([255 * value for value in spec.std])
    return steps.build()


def _running(compiled: Any) -> Callable[[NDArray[Any]], torch.Tensor]:
    request = compiled.create_infer_request()
    return lambda images: torch.from_numpy(request.infer({0: images}, share_inputs=True, share_outputs=True)[0])
