"""OpenVINO and ONNX Runtime, each with compiled models of its own, kept beside the experts' files.

Both get what they do best at loading: OpenVINO exports its compiled model, which is what its model cache keeps, and
imports it from memory without a copy; ONNX Runtime saves its optimised model in its own format. The bytes come through
the reader that all sides have, not through the libraries' own file access, so that all have the same disk. float32, as
slots compute; batch sizes are dynamic.
"""

import json
import platform
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from experts.memory import HostMemory
from experts.reading import CachedReader, FileReader
from experts.spec import Answer, ExpertSpec
from experts.vision.preprocess import Prepared
from tests.bench.live.expert_files import read_experts
from tests.bench.live.loading import FileBuffers, Loader, OrdinaryModels, answers_of, images_of

_REQUIREMENTS = Path(__file__).with_name("requirements.txt")


class CompiledModel(NamedTuple):
    """`run` asks the library; `memory` holds the file where the library goes on using it."""

    run: Callable[[Any], Any]
    memory: HostMemory | None


class OpenVino:
    """Imports compiled models. Each executor has a stream and its threads; a thread has its own request."""

    def __init__(self, reader: FileReader, threads: int) -> None:
        self._buffers = FileBuffers(reader)
        self._openvino: Any = import_module("openvino")
        self._core = self._openvino.Core()
        self._settings = _openvino_settings(threads)

    def load(self, spec: ExpertSpec) -> CompiledModel:
        memory = self._buffers.read(LIBRARIES["openvino"].file(spec))
        blob = self._openvino.Tensor(memory.array, shared_memory=True)
        compiled = self._core.import_model(blob, "CPU", self._settings)
        requests = threading.local()

        def run(images: Any) -> Any:
            if not hasattr(requests, "own"):
                requests.own = compiled.create_infer_request()
            return requests.own.infer({0: images}, share_inputs=True, share_outputs=True)[0]

        return CompiledModel(run, memory)

    def give_up(self, model: CompiledModel) -> None:
        if model.memory is not None:
            self._buffers.give_back(model.memory)

    def answer(self, model: CompiledModel, spec: ExpertSpec, prepared: Sequence[Prepared]) -> Sequence[Answer]:
        return _answer(model, spec, prepared)


class OnnxRuntime:
    """Makes a session of an optimised model. A session may be run by any threads; it has those of one executor."""

    def __init__(self, reader: FileReader, threads: int) -> None:
        self._buffers = FileBuffers(reader)
        self._runtime: Any = import_module("onnxruntime")
        self._options = self._runtime.SessionOptions()
        self._options.intra_op_num_threads = threads
        self._options.graph_optimization_level = self._runtime.GraphOptimizationLevel.ORT_DISABLE_ALL  # it is optimised

    def load(self, spec: ExpertSpec) -> CompiledModel:
        memory = self._buffers.read(LIBRARIES["onnxruntime"].file(spec))
        session = self._runtime.InferenceSession(bytes(memory.view), self._options, providers=["CPUExecutionProvider"])
        self._buffers.give_back(memory)
        return CompiledModel(lambda images: session.run(None, {"images": images})[0], None)

    def give_up(self, model: CompiledModel) -> None:
        """Nothing to do: the caller forgets the model."""

    def answer(self, model: CompiledModel, spec: ExpertSpec, prepared: Sequence[Prepared]) -> Sequence[Answer]:
        return _answer(model, spec, prepared)


def _answer(model: CompiledModel, spec: ExpertSpec, prepared: Sequence[Prepared]) -> list[Answer]:
    output = model.run(images_of(prepared, spec).numpy())
    return answers_of(torch.from_numpy(output), spec)


def _openvino_settings(threads: int) -> dict[str, Any]:
    return {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": threads}


def _compile_openvino(onnx: Path, file: Path) -> None:
    openvino: Any = import_module("openvino")
    compiled = openvino.Core().compile_model(str(onnx), "CPU", _openvino_settings(1))
    file.write_bytes(compiled.export_model().getvalue())


def _compile_onnxruntime(onnx: Path, file: Path) -> None:
    runtime: Any = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # it warns that the file is for this processor, which is meant
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(file)
    options.add_session_config_entry("session.save_model_format", "ORT")
    runtime.InferenceSession(str(onnx), options, providers=["CPUExecutionProvider"])


@dataclass(frozen=True, slots=True)
class Library:
    """One library: its packages, the ending of its files, how it compiles an ONNX file into one, and how it loads."""

    name: str
    suffix: str
    compile: Callable[[Path, Path], None]
    loader: Callable[[FileReader, int], Loader]

    def file(self, spec: ExpertSpec) -> Path:
        """Return the compiled model of an expert."""
        return spec.file.with_suffix(self.suffix)

    def stamp(self, catalog: Path) -> str:
        """Return what the compiled models depend on."""
        versions = [version(self.name), version("onnx"), torch.__version__, platform.processor()]
        return json.dumps([*versions, catalog.read_text(encoding="utf-8")])


LIBRARIES = {
    "openvino": Library("openvino", ".blob", _compile_openvino, OpenVino),
    "onnxruntime": Library("onnxruntime", ".ort", _compile_onnxruntime, OnnxRuntime),
}
#: The packages that a side needs, by library; ONNX is the form in which both compilers get a model.
#: Ray Serve needs gRPC, which comes with ray[serve] and not with Ray alone.
_PACKAGES = {"openvino": ("openvino", "onnx"), "onnxruntime": ("onnxruntime", "onnx"), "ray": ("ray", "grpc")}
_COMES_WITH = {"grpc": "ray"}


def library_versions() -> dict[str, str | None]:
    """Return the versions of the libraries that are installed, None for the others."""
    return {name: None if missing_library(name) else version(name) for name in _PACKAGES}


def missing_library(name: str) -> str | None:
    """Return what to install before a library can be a side, None if it is all there."""
    for package in _PACKAGES.get(name, ()):
        if find_spec(package) is None:
            return f"{package} is not installed: pip install '{requirement(_COMES_WITH.get(package, package))}'"
    return None


def requirement(package: str) -> str:
    """Return the package with the version that benchmarks were run with, as pip takes it."""
    return next(line for line in _REQUIREMENTS.read_text().splitlines() if line.startswith(package))


class CompileWork(NamedTuple):
    catalog: Path
    libraries: tuple[str, ...]


def compile_all(work: CompileWork) -> None:
    """Make the compiled models that are missing, in a process of its own: compilers leave memory behind."""
    models = OrdinaryModels(CachedReader())
    for name in work.libraries:
        stamp_file, stamp = work.catalog.with_name(f"{name}.json"), LIBRARIES[name].stamp(work.catalog)
        if not stamp_file.is_file() or stamp_file.read_text(encoding="utf-8") != stamp:
            for spec in read_experts(work.catalog).values():
                LIBRARIES[name].file(spec).unlink(missing_ok=True)
            stamp_file.write_text(stamp, encoding="utf-8")
    for spec in read_experts(work.catalog).values():
        missing = [name for name in work.libraries if not LIBRARIES[name].file(spec).is_file()]
        if not missing:
            continue
        onnx = spec.file.with_suffix(".onnx")
        _export(models.load(spec), spec, onnx)
        for name in missing:
            file = LIBRARIES[name].file(spec)
            unfinished = file.with_name(f"unfinished-{file.name}")
            LIBRARIES[name].compile(onnx, unfinished)
            unfinished.rename(file)
        onnx.unlink()


class FirstOutput(nn.Module):
    """A model with the first of its outputs only, which has a detector's boxes."""

    def __init__(self, model: nn.Module, *, is_list: bool) -> None:
        super().__init__()
        self.model, self.is_list = model, is_list

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output = self.model(images)
        return output[0] if self.is_list else output


def _export(model: nn.Module, spec: ExpertSpec, file: Path) -> None:
    images = torch.zeros(2, 3, spec.input_size, spec.input_size)
    batch = {0: "batch"}
    with torch.inference_mode(), warnings.catch_warnings():
        # torch's newer exporter needs another package and gives the same network; tracing warns of YOLO's own checks.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            FirstOutput(model, is_list=spec.task == "detect").eval(),
            (images,),
            str(file),
            dynamo=False,
            input_names=["images"],
            output_names=["answer"],
            dynamic_axes={"images": batch, "answer": batch},
        )
