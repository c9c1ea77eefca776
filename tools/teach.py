"""Commands that bring experts in: train them on your images, or import networks that you already have."""

from dataclasses import asdict
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


def import_expert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A torchvision state_dict or an ultralytics .pt.")],
    architecture: Annotated[str, typer.Option(help="resnet18 … resnet152, yolov5n … yolo26l.", show_default=False)],
    input_size: Annotated[int, typer.Option(min=32, help="Side of the square input, pixels.")] = 224,
    classes: Annotated[str | None, typer.Option(help="Labels in the network's order, with commas between.")] = None,
    out: Out = Path("experts"),
    catalog: Annotated[Path | None, typer.Option(help="Another catalog than OUT/catalog.yaml.")] = None,
    expert: ExpertName = None,
    images: Annotated[Path | None, typer.Option(help="Prove the agreement on these images, not on patterns.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="How weights are stored and computed.")] = Dtype.FLOAT32,
    trust: Annotated[bool, typer.Option("--trust", help="Open a pickled program, in a process of its own.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make an expert of a trained network: fold batch norms, write safetensors, prove that its outputs agree.

    Exit status 1 where the file cannot become an expert; then nothing was changed.

    Example: coserve import r0402.pth --architecture resnet18 --classes ok,missing,tombstone --input-size 96 --out experts
    """
    if not file.is_file():
        fail(f"no file {file}", status=2)
    from tools.importer import Form, ImportRefusedError, Target, import_file

    labels = tuple(label.strip() for label in classes.split(",")) if classes else None
    form = Form(dtype=dtype.value, origin=f"imported from {file.name}")
    target = Target(architecture, input_size, out, labels, expert, catalog, form)
    try:
        report = import_file(file, target, images=images, trust=trust)
    except ImportRefusedError as error:
        fail(str(error), status=1)
    agreement = report.agreement
    if as_json:
        print_json(
            {"expert": report.expert, "file": str(report.file), "entry": report.entry, "agreement": asdict(agreement)}
        )
        return
    console.print(
        f"{report.expert}: {report.weights_bytes / 1e6:,.1f} MB in {report.file}; on {agreement.images} images it differs from"
        f" the original by at most {agreement.confidence:.1e} in confidence and {agreement.box_pixels:.1e} pixels in boxes"
    )
