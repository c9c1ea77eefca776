"""`coserve train` and `coserve import`: train experts on your images, or import networks that you already have."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from daemon.units import count_text, size_text
from tools.terminal.console import AsJson, console, errors, fail, print_json, print_table
from tools.terminal.option_values import Commands, must_be_architecture
from tools.terminal.progress import share_bar

if TYPE_CHECKING:
    from tools.training.expert_file import ImportReport

#: Pictures held out, all of them answered right, after which an error rate of a quarter would be a surprise (1 in 20).
_ENOUGH_HELD_OUT = 10

train_app = typer.Typer(cls=Commands, no_args_is_help=True, help="Train an expert on your own images.")


Out = Annotated[Path, typer.Option("--out", help="Folder for the weights; catalog.yaml there gets the expert's entry.")]
InputSize = Annotated[int, typer.Option(min=32, help="Side of the square input, pixels.")]
Seed = Annotated[int, typer.Option(help="Another seed, another start.")]
Threads = Annotated[int, typer.Option(min=1, help="Processor threads.")]
ExpertName = Annotated[str | None, typer.Option("--id", help="The expert's id; the data set's name without it.")]


def import_expert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A torchvision state_dict or an ultralytics .pt.")],
    architecture: Annotated[str, typer.Option(help="resnet18 … resnet152, yolov5n … yolo26l.", show_default=False)],
    input_size: InputSize = 224,
    classes: Annotated[str | None, typer.Option(help="Labels in the network's order, with commas between.")] = None,
    out: Out = Path("experts"),
    expert: ExpertName = None,
    images: Annotated[Path | None, typer.Option(help="Prove the agreement on these images, not on patterns.")] = None,
    samples: Annotated[
        Path | None,
        typer.Option(help="Ordinary images of the line: how sure the expert is of them goes into the catalog (drift)."),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="How weights are computed; auto: the fastest that agrees with the original."),
    ] = "auto",
    store: Annotated[
        Literal["float32", "bfloat16", "int8", "auto"],
        typer.Option(help="Widest form of the file; auto: the thinnest whose answers on --images agree."),
    ] = "float32",
    trust: Annotated[bool, typer.Option("--trust", help="Open a pickled program, in a process of its own.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make an expert of a trained network: fold batch norms, write safetensors, prove that its outputs agree.

    Exit status 1 if the file cannot become an expert; then nothing was changed.

    Example: coserve import r0402.pth --architecture resnet18 --classes ok,missing --input-size 96 --out experts
    """
    if not file.is_file():
        fail(f"no file {file}", status=2)
    from tools.training.expert_file import Form, ImportRefusedError
    from tools.training.importer import ImportTarget, import_file

    must_be_architecture("--architecture", architecture, "classify", "detect")
    labels = tuple(label.strip() for label in classes.split(",")) if classes else None
    form = Form(dtype=dtype, origin=f"imported from {file.name}", store=store)
    target = ImportTarget(architecture, input_size, out, labels, expert, form)
    try:
        report = import_file(file, target, images=images, trust=trust)
    except ImportRefusedError as error:
        fail(str(error), status=1)
    if samples is not None:
        _measure(report, out / "catalog.yaml", samples)
    agreement = report.agreement
    if as_json:
        expert_row = {"expert": report.expert, "file": str(report.file), "entry": report.entry, "dtype": report.dtype}
        trials, thin = [asdict(trial) for trial in report.trials], [asdict(trial) for trial in report.thin]
        outcome = {"agreement": asdict(agreement), "tried": trials, "not_tried": list(report.unfit), "thin": thin}
        print_json(expert_row | outcome)
        return
    for trial in report.trials:
        outcome = "kept" if trial.dtype == report.dtype else "slower" if trial.agrees else "differs too much"
        console.print(
            f"{trial.dtype}: {trial.batch_ms:.1f} ms for 4 images, same labels on {trial.agreement.same_labels} of"
            f" {trial.agreement.images}, confidence within {trial.agreement.confidence:.1e}: {outcome}"
        )
    for trial in report.thin:
        precision = trial.agreement.mean_precision
        console.print(
            f"stored as {trial.stored_as}: {size_text(trial.bytes)}, same labels on {trial.agreement.same_labels} of"
            f" {trial.agreement.images}, confidence within {trial.agreement.confidence:.1e}"
            f"{'' if precision is None else f', mean precision {precision:.4f}'}: "
            + ("kept" if trial.agrees else "differs too much")
        )
    for reason in report.unfit:
        console.print(f"not tried: {reason}", markup=False)
    proof = f"images of {images}" if images is not None else "generated patterns (no photos: name some with --images)"
    console.print(
        f"{report.expert}: {size_text(report.spec.read_bytes)}, {report.file}, {report.dtype}"
        f"{f' stored as {report.spec.stored_as}' if report.spec.stored_as else ''}; on"
        f" {agreement.images} {proof} it names the same on {agreement.same_labels} and differs from the original by at"
        f" most {agreement.confidence:.1e} in confidence and {agreement.box_pixels:.1e} pixels",
        markup=False,
    )


def _measure(report: "ImportReport", catalog: Path, samples: Path) -> None:
    """Write the expert's confidences on `samples` into its entry; exit with status 1 if no image decodes."""
    from experts.catalog_edit import add_to_catalog
    from tools.experts.measure import MeasureError, confidences_of

    try:
        figures = confidences_of(report.spec, samples)
    except MeasureError as error:
        fail(f"{report.expert} is imported, but not measured: {error}", status=1)
    add_to_catalog(catalog, report.expert, {**report.entry, "confidences": figures})


@train_app.command("classifier")
def train_classifier(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="One subfolder of images for each label.")],
    architecture: Annotated[str, typer.Option(help="resnet18, 34, 50, 101 or 152.")] = "resnet18",
    input_size: InputSize = 96,
    epochs: Annotated[int, typer.Option(min=1, help="How often each image is seen.")] = 12,
    out: Out = Path("experts"),
    expert: ExpertName = None,
    seed: Seed = 0,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Train a classifier on a folder of labelled images, and add it to the catalog.

    Example: coserve train classifier images/R0402 --id R0402 --out experts
    """
    if not folder.is_dir():
        fail(f"no folder {folder}: name one with a subfolder of images for each label", status=2)
    from tools.training.classifier import train_classifier
    from tools.training.fit import Schedule

    must_be_architecture("--architecture", architecture, "classify")
    schedule = Schedule(epochs, seed=seed)
    with _training(expert or folder.name) as on_share:
        report = train_classifier(
            folder,
            architecture,
            input_size,
            out,
            expert=expert or folder.name,
            schedule=schedule,
            threads=threads,
            on_progress=on_share,
        )
    _warn_of_few({label.label: label.held_out for label in report.labels}, "a fifth of each label is held out")
    if as_json:
        print_json(asdict(report) | {"file": str(report.file), "accuracy": report.accuracy})
        return
    rows = [(label.label, label.held_out, label.right) for label in report.labels]
    print_table(f"{report.expert} on images held out", ("label", "images", "right"), rows)
    console.print(f"{report.accuracy:.3f} right; trained on {count_text(report.trained, 'image')}; {report.file}")


@train_app.command("detector")
def train_detector(
    data: Annotated[Path, typer.Argument(metavar="DATA.YAML", help="A YOLO data set: path, train, val, names.")],
    architecture: Annotated[str, typer.Option(help="yolov5n … yolo26l.")] = "yolo11n",
    input_size: InputSize = 320,
    minutes: Annotated[float, typer.Option(min=0.01, help="How long to train.")] = 20.0,
    out: Out = Path("experts"),
    expert: ExpertName = None,
    seed: Seed = 0,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Train a detector on a YOLO data set for so many minutes, and add it to the catalog.

    Example: coserve train detector solder/data.yaml --id yolo-solder --minutes 30 --out experts
    """
    if not data.is_file():
        fail(f"no file {data}: name the YAML file of a YOLO data set", status=2)
    from tools.training.detector import train_detector
    from tools.training.detector_loop import TrainingEffort

    must_be_architecture("--architecture", architecture, "detect")
    effort = TrainingEffort(minutes=minutes, seed=seed, threads=threads)
    name = expert or data.stem
    with _training(name) as on_share:
        report = train_detector(
            data,
            architecture,
            input_size,
            out,
            expert=name,
            effort=effort,
            on_progress=lambda progress: on_share(progress.share),
        )
    _warn_of_few({"images": report.held_out_images}, "those of val are held out")
    if as_json:
        print_json(asdict(report) | {"file": str(report.file), "catalog": str(report.catalog)})
        return
    console.print(
        f"{report.expert}: on {count_text(report.held_out_images, 'image')} held out F {report.f_score:.3f} (precision"
        f" {report.precision:.3f}, recall {report.recall:.3f} at confidence {report.threshold:.2f}), mAP50"
        f" {report.map50:.3f}; {report.steps} steps in {report.minutes:.1f} minutes; {report.file}"
    )


@contextmanager
def _training(name: str) -> Iterator[Callable[[float], None]]:
    """Yield a function that moves a bar to a share from 0 to 1; exit with status 1 on a TrainingError."""
    from tools.training import TrainingError

    with share_bar(f"training {name}") as (bar, task):
        try:
            yield lambda share: bar.update(task, completed=share)
        except TrainingError as error:
            bar.stop()
            fail(str(error), status=1)


def _warn_of_few(held_out: Mapping[str, int], where_from: str) -> None:
    """Warn on stderr of too few held-out pictures to judge by; the expert is written all the same."""
    few = ", ".join(f"{name} {count}" for name, count in held_out.items() if count < _ENOUGH_HELD_OUT)
    if few:
        errors.print(
            f"too few pictures held out to know how good it is: {few}, and fewer than {_ENOUGH_HELD_OUT} say little"
            f" ({where_from})",
            markup=False,
        )
