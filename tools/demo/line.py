"""Makes the demo's line in a folder: the experts shipped with the repository, rules and configuration."""

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from experts.weights import file_sha256
from tools.demo import files
from tools.terminal.console import CommandError

#: Weights, their catalog, `thresholds.json` and `provenance.json`; `coserve demo --train` makes them.
SHIPPED = Path(__file__).with_name("experts")


def shipped_figures(shipped: Path = SHIPPED) -> str:
    """Return a sentence with the measured accuracy of the shipped experts."""
    figures = json.loads((shipped / "provenance.json").read_text(encoding="utf-8"))["figures"]
    found, called = (
        " and ".join(f"{rate[name]['share']:{form}}" for rate in figures)
        for name, form in (("defects caught", ".1%"), ("good parts called", ".2%"))
    )
    rates = " and ".join(f"{rate['rate']:.0%}" for rate in figures)
    return (
        f"on boards that no training saw, with {rates} of defects: {found} of them found, {called} of good parts called"
    )


def make_line(folder: Path, shipped: Path = SHIPPED) -> Path:
    """Make the line in `folder`, and return the path of its coserve.yaml. An interrupted call can be repeated.

    Intact weights are kept, and so are a catalog, rules and a configuration, which the user may have edited.
    Raises CommandError if a shipped file is missing or changed.
    """
    entries = _checked_catalog(shipped)
    experts = folder / "experts"
    try:
        experts.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{experts} cannot be made: {error.strerror}; name another place with --dir") from None
    catalog = experts / "catalog.yaml"
    used = _entries(catalog) if catalog.exists() else entries
    for name, entry in entries.items():
        target = experts / entry["file"]
        is_shipped = used.get(name, {}).get("sha256") == entry["sha256"]  # else trained or promoted here
        if is_shipped and not (target.is_file() and file_sha256(target) == entry["sha256"]):
            _copy(shipped / entry["file"], target)
    if not catalog.exists():
        _copy(shipped / "catalog.yaml", catalog)
    if not (folder / "rules.yaml").exists():
        files.write_rules(folder, files.read_thresholds(shipped))
    return files.write_configuration(folder)


def _checked_catalog(shipped: Path) -> dict[str, Any]:
    """Return the shipped catalog's entries once every weights file matches its sha256. Raises CommandError."""
    catalog = shipped / "catalog.yaml"
    if not catalog.is_file():
        raise CommandError(f"{catalog} is missing. {_REMEDY}")
    entries = _entries(catalog)
    for name, entry in entries.items():
        file = shipped / entry["file"]
        if not file.is_file():
            raise CommandError(f"{file}, the weights of {name}, is missing (sha256 {entry['sha256']}). {_REMEDY}")
        if (found := file_sha256(file)) != entry["sha256"]:
            raise CommandError(f"{file}, the weights of {name}: sha256 {found}, expected {entry['sha256']}. {_REMEDY}")
    return entries


def _entries(catalog: Path) -> dict[str, Any]:
    try:
        entries = yaml.safe_load(catalog.read_text(encoding="utf-8"))["experts"]
        return {name: dict(entry) for name, entry in entries.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise CommandError(
            f"{catalog} cannot be read ({error}): correct it, or name another place with --dir"
        ) from None


_REMEDY = (
    "Install CoServe again (in a checkout: `git checkout -- tools/demo/experts`), or make new experts in hours: "
    "`coserve demo --train`."
)


def _copy(source: Path, target: Path) -> None:
    """Copy to a temporary name, then rename: `target` is never half written. Raises CommandError."""
    part = target.with_name(f".{target.name}.part")
    try:
        shutil.copyfile(source, part)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise CommandError(
            f"{target} cannot be written: {error.strerror}; make room, or name a place with --dir"
        ) from None
