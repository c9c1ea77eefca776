"""The licence of every distribution of this environment, out of the SBOM that CycloneDX's own tool wrote.

`python -m tools.release.licences build/sbom.json build/licences.txt` (part of `make sbom`) ends with 1 where one that
is needed at run time has no licence or is not in the SBOM.
"""

import base64
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.release.bundle import EXTRAS

OURS = "coserve"
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Licence:
    """One distribution. `licence` is empty where none is declared; `at_run_time`: the daemon's environment has it."""

    name: str
    version: str
    licence: str
    at_run_time: bool


def run_time_names(extras: Sequence[str] = EXTRAS) -> set[str]:
    """Canonical names of what is installed because our project needs it, with these extras; itself among them."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ours = [*project["dependencies"], *(need for extra in extras for need in project["optional-dependencies"][extra])]
    needed = {OURS}
    open_ends = [(need.name, frozenset(need.extras)) for need in map(Requirement, ours) if _applies(need, frozenset())]
    seen: set[tuple[str, frozenset[str]]] = set()
    while open_ends:
        name, asked = open_ends.pop()
        if (name, asked) in seen:
            continue
        seen.add((name, asked))
        try:
            needs = distribution(name).requires or ()
        except PackageNotFoundError:
            continue  # of another platform or Python
        needed.add(canonicalize_name(name))
        wanted = (need for need in map(Requirement, needs) if _applies(need, asked))
        open_ends += [(need.name, frozenset(need.extras)) for need in wanted]
    return needed


def _applies(need: Requirement, extras: frozenset[str]) -> bool:
    return need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def licences(sbom: Mapping[str, Any], run_time: set[str]) -> list[Licence]:
    """Every component of `sbom`, our own first."""
    components = [sbom["metadata"]["component"], *sbom["components"]]
    named = {canonicalize_name(one["name"]): one for one in components}
    return [
        Licence(one["name"], one.get("version", ""), _licence(one.get("licenses", ())), name in run_time)
        for name, one in named.items()
    ]


def missing(listed: Sequence[Licence], run_time: set[str]) -> list[str]:
    """Return packages needed at run time that the SBOM lacks, or lists without version or licence."""
    complete = {canonicalize_name(one.name) for one in listed if one.version and one.licence}
    return sorted(run_time - complete)


def _licence(declared: Sequence[Mapping[str, Any]]) -> str:
    """Identifiers where there are any, else what the classifier says, else the first line of the licence's text."""
    ids = [str(one.get("expression") or one["license"].get("id") or "") for one in declared]
    names = [one["license"].get("name", "") for one in declared if "license" in one]
    spoken = [name.rsplit(" :: ", 1)[-1] for name in names if " :: " in name]
    texts = [one["license"]["text"] for one in declared if "text" in one.get("license", {})]
    names = dict.fromkeys([one for one in ids if one] or spoken or [line for line in map(_first_line, texts) if line])
    return "; ".join(names)


def _first_line(text: Mapping[str, str]) -> str:
    content = text["content"]
    if text.get("encoding") == "base64":
        content = base64.b64decode(content).decode("utf-8", "replace")
    return next((line.strip() for line in content.splitlines() if line.strip()), "")[:80]


def main(sbom_file: Path, out: Path) -> int:
    run_time = run_time_names()
    listed = licences(json.loads(sbom_file.read_text(encoding="utf-8")), run_time)
    width = max(len(one.name) + len(one.version) for one in listed) + 2
    groups: dict[str, list[str]] = {"": [], "Only to build and test:": []}
    first, second = groups.values()
    for one in listed:
        rows = first if one.at_run_time else second
        rows.append(f"{one.name + ' ' + one.version:{width}}{one.licence or 'none declared'}")
    text = [line for title, rows in groups.items() for line in ([*(["", title, ""] if title else []), *rows])]
    out.write_text("\n".join(text) + "\n", encoding="utf-8")
    print(f"{sbom_file}: {len(first)} distributions at run time, {len(second)} tools; licences: {out}")
    lacking = missing(listed, run_time)
    if lacking:
        print(f"without a licence or a version: {', '.join(lacking)}", file=sys.stderr)
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
