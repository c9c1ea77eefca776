"""Commands that bring experts in: train them on your images, or import networks that you already have."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tools.console import AsJson, console, fail, print_json

train_app = typer.Typer(no_args_is_help=True, help="Train an expert on your own images.")


class Dtype(StrEnum):
    """Number formats that weights may be stored in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    app.add_typer(train_app, name="train")
    app.command("import")(import_expert)


Out = Annotated[Path, typer.Option("--out", help="Folder for the weights; catalog.yaml there gets the expert's entry.")]
ExpertName = Annotated[str | None, typer.Option("--id", help="The expert's id; the data set's name without it.")]
