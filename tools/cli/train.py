"""Make experts: `coserve train` on your images, `learn` from people's decisions, `import` of networks you have."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from daemon.units import count_text, size_text
from tools.cli.experts import print_summary
from tools.terminal.console import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigOption,
    as_typed,
    console,
    errors,
    fail,
    need_file,
    need_folder,
    print_json,
    print_table,
    share_bar,
)
from tools.terminal.option_values import Commands, must_be_one_of, since_option, time_window
from tools.training import architecture_of

if TYPE_CHECKING:
    from tools.training.classifier import Kind
    from tools.training.proof import Agreement

#: Pictures held out, all of them answered right, after which an error rate of a quarter would be a surprise (1 in 20).
_ENOUGH_HELD_OUT = 10

train_app = typer.Typer(cls=Commands, no_args_is_help=True, help="Train an expert on your own images.")


Out = Annotated[Path, typer.Option("--out", help="Folder for the weights; catalog.yaml there gets the expert's entry.")]
InputSize = Annotated[int, typer.Option(min=32, help="Side of the square input, pixels.")]
Seed = Annotated[int, typer.Option(min=0, help="Another seed, another start.")]
Threads = Annotated[int, typer.Option(min=1, help="Processor threads.")]
Play = Annotated[str, typer.Option(help="How far a good part may be off its place, such as 3px.")]
Symmetry = Annotated[
    bool, typer.Option("--symmetry", help="Try whether it helps that the part looks the same turned or mirrored.")
]
Store = Annotated[
    Literal["float32", "bfloat16", "int8"],
    typer.Option(help="Form of the file: a thin one is read faster, and expanded into the same memory."),
]
Backbone = Annotated[str | None, typer.Option(help="A backbone of the catalog, or another folder of experts with one.")]
#: What `train classifier` tries (tools/training/classifier.py).
_KINDS = "bank,head,last-block,all-layers"
Tries = Annotated[str, typer.Option(help="What to try, cheapest first, with commas between.")]
ExpertName = Annotated[str | None, typer.Option("--id", help="The expert's id; default: the data set's name.")]


def import_expert(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Weights of torchvision (a state_dict) or an ultralytics .pt.")
    ],
    architecture: Annotated[str, typer.Option(help="resnet18 … resnet152, yolov5n … yolo26l.", show_default=False)],
    input_size: InputSize = 224,
    classes: Annotated[str | None, typer.Option(help="Labels in the network's order, with commas between.")] = None,
    out: Out = Path("experts"),
    expert: ExpertName = None,
    images: Annotated[
        Path | None,
        typer.Option(help="Prove the agreement on these images; in folders named as the classes, measure it on them."),
    ] = None,
    samples: Annotated[
        Path | None, typer.Option(help="Images of the line: confidences on them go into the catalog, as by measure.")
    ] = None,
    normalize: Annotated[
        Literal["imagenet", "none", ".5"] | None,
        typer.Option(help="How a classifier's pictures were normalised; without it, what fits labelled --images."),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="How weights are computed; auto: the fastest that agrees with the original."),
    ] = "auto",
    store: Annotated[
        Literal["float32", "bfloat16", "int8", "auto"],
        typer.Option(help="Widest form of the file; auto: the thinnest whose answers on --images agree."),
    ] = "float32",
    _trust: Annotated[bool, typer.Option("--trust", hidden=True, help="Nothing of a file runs any more.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make an expert of a trained network: fold batch norms, write safetensors, prove that its outputs agree.

    Exit status 1 if the file cannot become an expert; then nothing was changed.

    Example: coserve import r0402.pth --architecture resnet18 --classes ok,missing --input-size 96 --images photos
    """
    need_file(file, "name a network's file")
    from tools.training.expert_file import Form, make_in
    from tools.training.importer import import_file

    architecture_of(architecture, "classify", "detect")
    make = partial(
        import_file,
        file,
        architecture,
        input_size,
        classes=classes.split(",") if classes else (),
        expert=expert,
        form=Form(dtype=dtype, origin=f"imported from {file.name}", store=store),
        images=images,
        samples=samples,
        normalize=normalize,
    )
    with share_bar(f"importing {expert or file.stem}") as on_share:
        report, version = make_in(out, expert or file.stem, file, partial(make, on_share=on_share))
    agreement = report.agreement
    if as_json:
        expert_row = {"expert": report.expert, "file": str(report.file), "entry": report.entry, "dtype": report.dtype}
        trials, thin = [asdict(trial) for trial in report.trials], [asdict(trial) for trial in report.thin]
        outcome = {"agreement": asdict(agreement), "tried": trials, "not_tried": list(report.unfit), "thin": thin}
        print_json(expert_row | outcome | {"candidate": version, "notes": list(report.notes)})
        return
    for note in report.notes:
        console.print(note, markup=False)
    for trial in report.trials:
        outcome = "kept" if trial.dtype == report.dtype else "slower" if trial.agrees else "differs too much"
        console.print(f"{trial.dtype}: {trial.batch_ms:.1f} ms for 4 images, {_in_words(trial.agreement)}: {outcome}")
    for trial in report.thin:
        outcome = "kept" if trial.agrees else "differs too much"
        size = size_text(trial.bytes)
        console.print(f"stored as {trial.stored_as}: {size}, {_in_words(trial.agreement)}: {outcome}")
    for reason in report.unfit:
        console.print(f"not tried: {reason}", markup=False)
    proof = f"images of {images}" if images is not None else "generated patterns (no photos: name some with --images)"
    pixels = f" and {agreement.box_pixels:.1e} pixels" if report.spec.task == "detect" else ""
    console.print(
        f"{report.expert}: {size_text(report.spec.read_bytes)}, {report.file}, {report.dtype}"
        f"{f' stored as {report.spec.stored_as}' if report.spec.stored_as else ''}; on"
        f" {agreement.images} {proof} it names the same on {agreement.same_labels} and differs from the original by at"
        f" most {agreement.confidence:.1e} in confidence{pixels}",
        markup=False,
    )
    _say_candidate(report.expert, version)


@train_app.command("backbone")
def train_backbone(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDERS", help="One for each component type, as for a classifier.")
    ] = None,
    architecture: Annotated[str, typer.Option(help="resnet18, 34, 50, 101 or 152.")] = "resnet18",
    input_size: InputSize = 96,
    epochs: Annotated[int, typer.Option(min=1, help="How often each image is seen.")] = 40,
    start: Annotated[
        Path | None,
        typer.Option("--from", help="Begin with torchvision weights; without FOLDERS take them as they are."),
    ] = None,
    symmetry: Annotated[
        bool,
        typer.Option("--symmetry", help="The parts have no right way round: turned and mirrored they look the same."),
    ] = False,
    play: Annotated[int, typer.Option(min=0, help="With --symmetry: pixels of the input that parts may be moved.")] = 0,
    store: Store = "float32",
    out: Out = Path("experts"),
    name: Annotated[str, typer.Option("--id", help="The backbone's id.")] = "backbone",
    seed: Seed = 0,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Train the network that the heads of a line share, from the images of all component types that there are.

    Example: coserve train backbone training/* --out experts
    """
    if not folders and start is None:
        fail("name the folders of component types, or torchvision weights with --from", status=2)
    missing = next((path for path in (*(folders or []), *([start] if start else [])) if not path.exists()), None)
    if missing is not None:
        fail(f"there is no {missing}", status=2)
    from tools.training.backbone import BackbonePlan, train_backbone
    from tools.training.fit import Schedule, Variation

    architecture_of(architecture, "classify")
    if play and not symmetry:
        fail("--play needs --symmetry here: otherwise the position of a part is what the backbone learns", status=2)
    schedule = Schedule(epochs, learning_rate=2e-3, seed=seed)
    vary = Variation(play, "all") if symmetry else None
    plan = BackbonePlan(architecture, input_size, schedule, threads, start, vary, store)
    with share_bar(f"training {name}") as on_share:
        report = train_backbone(folders or [], out, name=name, plan=plan, on_progress=on_share)
    if as_json:
        print_json(report)
        return
    pictures = count_text(report["pictures"], "image")
    learned = f"from {pictures} of {report['classes']} labels" if folders else f"from {start}"
    console.print(
        f"backbone {name} {report['version']} {learned}: {report['file']}\nnow train experts on it:"
        f" coserve train classifier FOLDER --out {out}"
    )


@train_app.command("classifier")
def train_classifier(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="One subfolder of images for each label.")],
    architecture: Annotated[
        str | None, typer.Option(help="resnet18 … resnet152; the backbone's, or resnet18.", show_default=False)
    ] = None,
    input_size: Annotated[
        int | None, typer.Option(min=32, help="Side of the square input, pixels; the backbone's, or 96.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often a network of its own sees each image.")] = 12,
    backbone: Backbone = None,
    tries: Tries = _KINDS,
    play: Play = "0px",
    symmetry: Symmetry = False,
    good: Annotated[str | None, typer.Option(help="The label that passes. Default: ok, good or pass.")] = None,
    use_anyway: Annotated[
        bool, typer.Option("--use-anyway", help="Write the expert even if it ranks fewer than 90 % of the pairs right.")
    ] = False,
    out: Out = Path("experts"),
    expert: ExpertName = None,
    seed: Seed = 0,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Train the smallest classifier that is good enough on a folder of labelled images, and add it to the catalog.

    Tried are a bank of good pictures and a head on the catalog's backbone, and networks of their own. The mistakes on
    images held out are printed; pictures of them are in OUT/reports.

    Example: coserve train classifier images/R0402 --id R0402 --out experts
    """
    need_folder(folder, "name one with a subfolder of images for each label")
    from tools.training.classifier import TrainingPlan, train_classifier
    from tools.training.expert_file import make_in
    from tools.training.fit import Schedule
    from tools.training.report import COLUMNS, cells, draw_report, figures, report_text

    if architecture is not None:
        architecture_of(architecture, "classify")
    plan = TrainingPlan(
        Schedule(epochs, seed=seed),
        threads,
        architecture=architecture,
        input_size=input_size,
        backbone=backbone,
        kinds=_kinds_of(tries),
        play=_pixels_of(play),
        symmetry=symmetry,
        good=good,
        use_anyway=use_anyway,
    )
    name = expert or folder.name
    with share_bar(f"training {name}") as on_share:
        train = partial(train_classifier, folder, expert=name, plan=plan, on_progress=on_share)
        report, version = make_in(out, name, folder, train)
    pictures = draw_report(report, out / "reports")
    for note in report.notes:
        errors.print(note, markup=False)
    if as_json:
        print_json({"expert": name, "file": str(report.file), "tried": figures(report), "candidate": version})
        return
    print_table(f"{name} on images held out", COLUMNS, [cells(row) for row in figures(report)])
    console.print(report_text(report, pictures), markup=False)
    _say_candidate(name, version)


@train_app.command("all")
def train_all(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder for each component type, of labels each.")],
    input_size: Annotated[int, typer.Option(min=32, help="Side of the square input of a new backbone, pixels.")] = 96,
    epochs: Annotated[int, typer.Option(min=1, help="How often a new backbone sees each image.")] = 40,
    backbone: Backbone = None,
    tries: Tries = _KINDS,
    play: Play = "0px",
    out: Out = Path("experts"),
    seed: Seed = 0,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Train an expert for each component type, on a backbone that is trained first if the catalog has none.

    Stopped and started again, it goes on where it was: experts are kept whose images have not changed. Exit status 1 if
    a type could not be trained; the others still are. A folder that cannot be read stops a new backbone.

    Example: coserve train all training --out line/experts
    """
    from tools.training.backbone import BackbonePlan, load_backbone, train_backbone
    from tools.training.classifier import TrainingPlan
    from tools.training.everything import train_each, type_folders
    from tools.training.fit import Schedule
    from tools.training.report import COLUMNS, cells

    plan = TrainingPlan(
        Schedule(12, seed=seed), threads, backbone=backbone, kinds=_kinds_of(tries), play=_pixels_of(play)
    )
    need_folder(folder, "name one with a subfolder for each component type")
    folders = type_folders(folder)
    if load_backbone(out / "catalog.yaml", backbone) is None:
        of_backbone = BackbonePlan(
            input_size=input_size, schedule=Schedule(epochs, learning_rate=2e-3, seed=seed), threads=threads
        )
        with share_bar("training the backbone") as on_share:
            train_backbone(folders, out, name="backbone", plan=of_backbone, on_progress=on_share)
    with share_bar(f"training {count_text(len(folders), 'expert')}") as on_share:
        reports = train_each(folders, out, plan, on_share)
    failed = [report for report in reports if report.error is not None]
    for report in failed:
        errors.print(f"{report.expert}: {report.error}", markup=False)
    if as_json:
        print_json({"experts": [asdict(report) for report in reports]})
    else:
        rows = [
            (report.expert, *cells(report.figures), "kept" if report.is_kept else "new")
            for report in reports
            if report.figures is not None
        ]
        print_table(f"Experts of {folder} on images held out", ("expert", *COLUMNS, ""), rows)
    if failed:
        raise typer.Exit(1)


@train_app.command("detector")
def train_detector(
    data: Annotated[Path, typer.Argument(metavar="DATA.YAML", help="A YOLO data set: path, train, val, names.")],
    architecture: Annotated[str, typer.Option(help="yolov5n … yolo26l.")] = "yolo11n",
    input_size: InputSize = 320,
    minutes: Annotated[float, typer.Option(min=0.01, help="How long to train.")] = 20.0,
    symmetry: Annotated[
        bool, typer.Option("--symmetry", help="The images have no right way round: show them turned and mirrored too.")
    ] = False,
    zoom: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Show images up to this share larger or smaller; 0.4: 0.6 to 1.4.")
    ] = 0.4,
    crop: Annotated[
        int | None,
        typer.Option(min=32, help="Train on squares of this many input pixels, mostly around objects: faster."),
    ] = None,
    store: Store = "float32",
    out: Out = Path("experts"),
    expert: ExpertName = None,
    seed: Seed = 0,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Train a detector on a YOLO data set for a given time, and add it to the catalog.

    Example: coserve train detector solder/data.yaml --id yolo-solder --minutes 30 --out experts
    """
    need_file(data, "name the YAML file of a YOLO data set")
    from tools.training.detector import Views, train_detector
    from tools.training.detector_loop import TrainingEffort
    from tools.training.expert_file import make_in

    architecture_of(architecture, "detect")
    effort = TrainingEffort(minutes=minutes, seed=seed, threads=threads)
    name = expert or data.stem
    with share_bar(f"training {name}") as on_share:
        train = partial(
            train_detector,
            data,
            architecture,
            input_size,
            expert=name,
            effort=effort,
            views=Views(symmetry, zoom, crop),
            store=store,
            say=errors.print,
            on_progress=lambda progress: on_share(progress.share),
        )
        report, version = make_in(out, name, data, train)
    if report.held_out_images < _ENOUGH_HELD_OUT:
        errors.print(
            f"too few pictures held out to know how good it is: {report.held_out_images} of val, and fewer than"
            f" {_ENOUGH_HELD_OUT} say little",
            markup=False,
        )
    if as_json:
        files = {"file": str(report.file), "catalog": str(out / "catalog.yaml"), "candidate": version}
        print_json(asdict(report) | files)
        return
    console.print(
        f"{report.expert}: on {count_text(report.held_out_images, 'image')} held out F {report.f_score:.3f} (precision"
        f" {report.precision:.3f}, recall {report.recall:.3f} at confidence {report.threshold:.2f}), mAP50"
        f" {report.map50:.3f}; {report.steps} steps in {report.minutes:.1f} minutes; {report.file}"
    )
    _say_candidate(name, version)


def _in_words(agreement: "Agreement") -> str:
    precision = agreement.mean_precision
    return (
        f"same labels on {agreement.same_labels} of {agreement.images}, confidence within {agreement.confidence:.1e}"
        f"{'' if precision is None else f', mean precision {precision:.4f}'}"
    )


def _say_candidate(name: str, version: str | None) -> None:
    if version is not None:
        then = as_typed(f"experts promote {name} {version}")
        console.print(f"{name} {version} is kept as a candidate: nothing changes until {then}", markup=False)


def _kinds_of(text: str) -> "tuple[Kind, ...]":
    from tools.training.classifier import KINDS

    chosen = [kind.strip() for kind in text.split(",")]
    for kind in chosen:
        must_be_one_of("--tries", kind, KINDS)
    return tuple(kind for kind in KINDS if kind in chosen)


def _pixels_of(text: str) -> float:
    """Return pixels of pictures from `3px` or `3`; exit with status 2 for anything else."""
    try:
        pixels = float(text.removesuffix("px"))
    except ValueError:
        pixels = -1.0
    if not 0 <= pixels <= 1000:
        fail(f"--play {text}: expected pixels of the pictures, such as 3px", status=2)
    return pixels


def learn(
    name: Annotated[str, typer.Argument(metavar="EXPERT", help="A classifier of the catalog.", show_default=False)],
    config: ConfigOption = DEFAULT_CONFIG,
    training: Annotated[
        Path | None,
        typer.Option(
            "--with",
            metavar="FOLDER",
            help="The folder that it was trained on: LABEL/*.png.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    since: Annotated[str | None, since_option("Judge images again that were judged then or later")] = "7d ago",
    sample: Annotated[int, typer.Option(min=1, help="Judge at most this many again, chosen at random.")] = 2000,
    play: Play = "0px",
    symmetry: Symmetry = False,
    seed: Seed = 0,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Train another version of a classifier with the pictures that people decided about, and compare it.

    It is kept as a candidate: nothing changes until `coserve experts promote`. The command prints its mistakes on
    pictures held out (never of a board that it learned from) beside those of the version in service, and what it would
    change in the stored images from --since on. The page Teach of the expert shows the same with pictures.

    Example: coserve learn R0402 --with training/R0402 --config demo/coserve.yaml
    """
    from tools.experts.line import open_line
    from tools.learn import learn as learn_expert
    from tools.training.classifier import TrainingPlan
    from tools.training.fit import Schedule

    since, _ = time_window(config, since, None, None)
    plan = TrainingPlan(Schedule(12, seed=seed), threads, play=_pixels_of(play), symmetry=symmetry)
    line = open_line(config)
    with share_bar(f"training {name}") as on_share:
        learned = learn_expert(line, name, training, plan, since=since, sample=sample, on_progress=on_share)
    if as_json:
        print_json(learned)
        return
    _print_learned(learned, config)


def _print_learned(learned: dict[str, Any], config: Path) -> None:
    from tools.training.report import COLUMNS

    name, version = learned["expert"], learned["version"]
    for note in learned["notes"]:
        console.print(f"note: {note}", markup=False)
    for reason, count in learned["left_out"].items():
        console.print(f"left out: {count_text(count, 'picture')}, {reason}", markup=False)
    rows = [(label, count, learned["decided"].get(label)) for label, count in learned["pictures"].items()]
    print_table(f"{name} learned from", ("label", "pictures", "decided on the line"), rows)
    print_table(f"{name} {version} on pictures held out", COLUMNS, learned["table"])
    compared = learned["compared"]
    if compared is None:
        console.print(f"{learned['in_service']}, in service, has answered none of them: the two are not compared")
    else:
        rows = [
            (f"{learned['in_service']}, in service", *compared["in_service"].values()),
            (f"{version}, learned", *compared["learned"].values()),
        ]
        print_table("On pictures that neither has learned from", ("version", "escapes", "false calls"), rows)
        console.print(compared["says"])
    print_summary(learned["rejudged"], learned["list"], "--json")
    console.print(f"{name} {version} is kept as a candidate; next, if it is better:", markup=False)
    console.print(as_typed(f"experts shadow {name} {version} --config {config}"), markup=False)
    console.print(as_typed(f"experts promote {name} {version} --config {config}"), markup=False)
