"""Options that several benchmarks have."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from tools.terminal.option_values import must_be_one_of

DeviceNames = Annotated[
    list[str] | None, typer.Option("--device", help="cpu, cuda:0, …; may be given again. Default: all of this machine.")
]


def chosen_devices(names: Iterable[str] | None) -> tuple[str, ...]:
    """Return the devices of `--device`, all of this machine without it; exit with status 2 if one is not here."""
    import torch

    here = ("cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count())))
    for name in names or ():
        must_be_one_of("--device", name, here)
    return tuple(dict.fromkeys(names or here))


def _checked_json_file(file: Path | None) -> Path | None:
    if file is None or (os.access(file, os.W_OK) and not file.is_dir()):
        return file
    if file.exists() or not os.access(file.parent, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"cannot write {file}: name a file in a folder that exists and that you may write to")
    return file


JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write all figures to this file.", callback=_checked_json_file)
]
