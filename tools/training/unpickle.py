"""Opens an ultralytics `.pt`, which is a pickled program, in a process of its own.

`python -m tools.training.unpickle MODEL.pt SQUARES.safetensors OUT.safetensors` writes the model's tensors, its class
names, and its answers to the images, as plain safetensors.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

_STATE, _OUTPUT = "state/", "output/"


@dataclass(frozen=True, slots=True)
class Unpickled:
    """The content of a pickled detector. `outputs` are its answers to the squares, in order, one batch each."""

    state_dict: dict[str, torch.Tensor]
    classes: tuple[str, ...]
    end_to_end: bool
    outputs: tuple[torch.Tensor, ...]


def unpickle_elsewhere(file: Path, squares: Sequence[NDArray[np.uint8]]) -> Unpickled:
    """Run this module as a process. Raises ValueError with its last line if it fails."""
    with tempfile.TemporaryDirectory(prefix="coserve-import-") as folder:
        squares_file, answer_file = Path(folder) / "squares.safetensors", Path(folder) / "answer.safetensors"
        save_file({f"{number:06}": torch.from_numpy(square) for number, square in enumerate(squares)}, squares_file)
        search = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        finished = subprocess.run(  # noqa: S603  # our own module; the user asked to trust the file
            [sys.executable, "-m", "tools.training.unpickle", str(file.resolve()), str(squares_file), str(answer_file)],
            env={**os.environ, "PYTHONPATH": search.rstrip(os.pathsep)},
            capture_output=True,
            text=True,
            check=False,
        )
        if finished.returncode or not answer_file.is_file():
            lines = finished.stderr.strip().splitlines() or [f"exit status {finished.returncode}"]
            raise ValueError(f"could not be opened: {lines[-1]}")
        with safe_open(answer_file, "pt") as answer:
            tensors = {name: answer.get_tensor(name) for name in answer.keys()}  # noqa: SIM118  # not a mapping
            metadata = answer.metadata()
    state = {name.removeprefix(_STATE): tensor for name, tensor in tensors.items() if name.startswith(_STATE)}
    outputs = tuple(tensors[name] for name in sorted(tensors) if name.startswith(_OUTPUT))
    return Unpickled(state, tuple(json.loads(metadata["classes"])), metadata["end_to_end"] == "True", outputs)


def main(arguments: Sequence[str]) -> None:
    """Write OUT.safetensors; the arguments are the three paths of the module's docstring."""
    from experts.vision.frameworks import ultralytics
    from experts.vision.networks import is_end_to_end

    model_file, squares_file, answer_file = map(Path, arguments)
    ultralytics()
    from ultralytics.nn.tasks import DetectionModel, torch_safe_load

    checkpoint: Any = torch_safe_load(str(model_file), safe_only=False)[0]
    model = (checkpoint.get("ema") or checkpoint.get("model")) if isinstance(checkpoint, dict) else None
    if not isinstance(model, DetectionModel):
        sys.exit(f"it holds a {type(model or checkpoint).__name__}, not an ultralytics detection model")
    model = model.float().eval()
    tensors = {f"{_STATE}{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    with safe_open(squares_file, "pt") as squares, torch.inference_mode():
        for name in sorted(squares.keys()):
            image = squares.get_tensor(name).permute(2, 0, 1)[None].float() / 255
            output = model(image)
            tensors[f"{_OUTPUT}{name}"] = (output[0] if isinstance(output, tuple) else output).contiguous()
    names = [str(model.names[index]) for index in sorted(model.names)]
    metadata = {"classes": json.dumps(names), "end_to_end": str(is_end_to_end(model))}
    save_file(tensors, answer_file, metadata=metadata)


if __name__ == "__main__":
    main(sys.argv[1:])
