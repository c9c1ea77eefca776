"""Options that several benchmarks have."""

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


JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write all figures to this file.", dir_okay=False, writable=True)
]
