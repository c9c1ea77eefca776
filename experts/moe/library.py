"""Import transformers offline, and torchvision before it.

Its modelling modules import torchvision, whose published wheel fails to import beside a build of torch that it was not
compiled for; `experts.vision.frameworks` repairs that.
"""

import importlib
import os
from types import ModuleType
from typing import Any


def transformers() -> ModuleType:
    """Raises ModuleNotFoundError if the extra `moe` is not installed."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")  # read when the libraries are imported
    library = importlib.import_module("transformers")
    constants: Any = importlib.import_module("huggingface_hub.constants")
    constants.HF_HUB_OFFLINE = True  # other code may have imported it before
    from experts.vision.frameworks import torchvision  # noqa: PLC0415  (brings cv2; only what builds models needs it)

    torchvision()
    return library
