"""Makes the demo's line in a folder: the experts shipped with the repository, rules and configuration."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from daemon.storage.database.upkeep import room_problem
from experts.catalog import CatalogEntry, CatalogFile
from experts.durable import replace_durably, replacing
from experts.weights import file_sha256
from routing_rules.load import read_yaml, validate
from tools.camera.render import board_types, part_types
from tools.terminal.console import CommandError, as_typed

#: Weights, their catalog, thresholds and `provenance.json`; `coserve demo --train` makes them.
SHIPPED = Path(__file__).with_name("experts")
#: Free disk that the line needs; with less its daemon would answer `busy` for ever.
_ROOM_BYTES = 100_000_000
_REMEDY = "Restore it: `git checkout -- tools/demo/experts`, or make new experts in hours: `coserve demo --train`."
#: The detector of each package family's solder.
SOLDER_DETECTORS = {
    "chip": "solder-chip",
    "led": "solder-chip",
    "electrolytic": "solder-chip",
    "sot23": "solder-leaded",
    "soic": "solder-leaded",
    "qfp": "solder-leaded",
    "connector": "solder-leaded",
}
_CODES = {
    "missing": "D101",
    "shifted": "D102",
    "rotated": "D103",
    "reversed": "D104",
    "tombstone": "D105",
    "wrong_part": "D106",
    "bridge": "D201",
    "insufficient": "D202",
    "lifted_lead": "D203",
}


def shipped_figures(shipped: Path = SHIPPED) -> str:
    figures = json.loads((shipped / "provenance.json").read_text(encoding="utf-8"))["figures"]
    found, called = (
        " and ".join(f"{rate[name]['share']:{form}}" for rate in figures)
        for name, form in (("defects caught", ".1%"), ("good parts called", ".2%"))
    )
    rates = " and ".join(f"{rate['rate']:.0%}" for rate in figures)
    return (
        f"on 400 boards that no training saw, with {rates} of defects, they found {found} of these, and"
        f" stopped {called} of the good parts"
    )


def describe_line(folder: Path) -> str:
    """Return a sentence with the accuracy of the line's experts, unless they are not the shipped ones."""
    catalogs = folder / "experts" / "catalog.yaml", SHIPPED / "catalog.yaml"
    own, expected = ({name: entry.sha256 for name, entry in _entries(catalog).items()} for catalog in catalogs)
    if own != expected:
        measure = as_typed(f"demo --dir {shlex.quote(str(folder))} --measure")
        return f"{folder}/ has a line with other experts than the shipped ones: `{measure}` tells what they are worth."
    return f"{folder}/ has a line with 18 trained experts and their backbone; {shipped_figures()}."


def make_line(folder: Path, shipped: Path = SHIPPED) -> Path:
    """Make the line in `folder`, and return the path of its coserve.yaml. An interrupted call can be repeated.

    Intact weights are kept, and so are a catalog, rules and a configuration, which the user may have edited.
    Raises CommandError if a shipped file is missing or changed, or the folder cannot be written or has too little room.
    """
    _check_shipped(shipped)
    _check_room(folder)
    try:
        experts = folder / "experts"
        experts.mkdir(parents=True, exist_ok=True)
        catalog = experts / "catalog.yaml"
        if not catalog.exists():
            _copy(shipped / "catalog.yaml", catalog)
        entries = _entries(catalog)
        for name, entry in _entries(shipped / "catalog.yaml").items():
            target = experts / entry.file
            is_shipped = name in entries and entries[name].sha256 == entry.sha256  # else trained or promoted here
            if is_shipped and not (target.is_file() and file_sha256(target) == entry.sha256):
                _copy(shipped / entry.file, target)
        if not (folder / "rules.yaml").exists():
            write_rules(folder, read_thresholds(shipped))
        return write_configuration(folder)
    except OSError as error:
        what = f"{error.filename or folder} cannot be written: {error.strerror or error}"
        raise CommandError(f"{what}; make room, or name another place with --dir") from None


def _check_shipped(shipped: Path) -> None:
    """Raise CommandError unless every file is as `provenance.json` names it."""
    provenance = shipped / "provenance.json"
    try:
        sums = {name: file["sha256"] for name, file in json.loads(provenance.read_text("utf-8"))["files"].items()}
        shipped_figures(shipped)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CommandError(f"{provenance} cannot be read ({error}). {_REMEDY}") from None
    for name, sha256 in sums.items():
        file = shipped / name
        if not file.is_file():
            raise CommandError(f"{file} is missing (sha256 {sha256}). {_REMEDY}")
        if (found := file_sha256(file)) != sha256:
            raise CommandError(f"{file} has sha256 {found}, expected {sha256}. {_REMEDY}")


def _check_room(folder: Path) -> None:
    present = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
    if problem := room_problem(present, _ROOM_BYTES, "the demo"):
        raise CommandError(f"{problem}, or name another place with --dir")


def _entries(catalog: Path) -> dict[str, CatalogEntry]:
    file, problems = validate(CatalogFile, read_yaml(catalog))
    if file is None:
        raise CommandError(f"{problems[0]}. Correct it, or name another place with --dir.")
    return dict(file.experts)


def _copy(source: Path, target: Path) -> None:
    with replacing(target) as part:
        part.write_bytes(source.read_bytes())


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The confidences of the rules, chosen on boards that no training saw (`thresholds.json` beside the weights).

    `review_below`, by component: an answer below it goes to review. `fail_on`, by package family and solder label: a
    box at or above it fails the part.
    """

    review_below: dict[str, float]
    fail_on: dict[str, dict[str, float]]


def read_thresholds(experts: Path) -> Thresholds:
    return Thresholds(**json.loads((experts / "thresholds.json").read_text("utf-8")))


def write_configuration(folder: Path) -> Path:
    """Write `folder/coserve.yaml` unless it exists: the user may have edited it."""
    path = folder / "coserve.yaml"
    if not path.exists():
        text = Path(__file__).with_name("coserve.yaml").read_text(encoding="utf-8")
        replace_durably(path, text.replace("{folder}", str(folder)))
    return path


def write_rules(folder: Path, thresholds: Thresholds) -> Path:
    """Write `folder/rules.yaml` for the four board types."""
    lines = [
        "# Which expert looks at which component, and what passes. Check:  coserve rules check rules.yaml",
        "boards:",
    ]
    for board in board_types().values():
        lines += [f"  {board.name}:", "    time_limit: 60s", "    components:"]
        lines += [f"      {part}: [{', '.join(names)}]" for part, names in board.designators().items()]
    lines += ["", "classifiers:   # what passes goes on to the detector of its package family's solder"]
    for name, part in part_types().items():
        answers = f'expert: "{name}", pass: [ok], review_below: {thresholds.review_below[name]:.2f}'
        lines.append(f'  "{name}": {{{answers}, then: solder-{part.family}, pass_rate: 0.95}}')
    lines += ["", "detectors:   # families share experts, but not the confidence from which a box is a defect"]
    found: dict[str, set[str]] = {}
    for family, limits in thresholds.fail_on.items():
        found.setdefault(SOLDER_DETECTORS[family], set()).update(limits)
    for family, limits in thresholds.fail_on.items():
        text = ", ".join(f"{label}: {limit:.2f}" for label, limit in limits.items())
        elsewhere = sorted(found[SOLDER_DETECTORS[family]].difference(limits))
        ignored = f", ignore: [{', '.join(elsewhere)}]" if elsewhere else ""
        lines.append(f"  solder-{family}: {{expert: {SOLDER_DETECTORS[family]}, fail_on: {{{text}}}{ignored}}}")
    labels = set[str]().union(*found.values(), *(part.labels for part in part_types().values()))
    lines += ["", "defects:"]
    lines += [f"  {label}: {code}   # {label.replace('_', ' ')}" for label, code in _CODES.items() if label in labels]
    path = folder / "rules.yaml"
    replace_durably(path, "\n".join(lines) + "\n")
    return path
