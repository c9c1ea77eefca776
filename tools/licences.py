"""The licence of every distribution of this environment, out of the SBOM that CycloneDX's own tool wrote.

`python -m tools.licences build/sbom.json build/licences.txt` (part of `make sbom`) ends with 1 where one that is needed
at run time has no licence or is not in the SBOM.
"""

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OURS = "coserve"


@dataclass(frozen=True, slots=True)
class Licence:
    """One distribution. `licence` is empty where none is declared; `at_run_time`: the daemon's environment has it."""

    name: str
    version: str
    licence: str
    at_run_time: bool


def run_time_names(root: str = OURS) -> set[str]:
    """Canonical names of what is installed because `root` needs it, without extras; itself among them."""
    found: set[str] = set()
    open_ends: list[tuple[str, frozenset[str]]] = [(root, frozenset())]
    seen: set[tuple[str, frozenset[str]]] = set()
    while open_ends:
        name, extras = open_ends.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            needs = distribution(name).requires or ()
        except PackageNotFoundError:
            continue  # of another platform or Python
        found.add(canonicalize_name(name))
        wanted = (need for need in map(Requirement, needs) if _applies(need, extras))
        open_ends += [(need.name, frozenset(need.extras)) for need in wanted]
    return found


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
    """What is needed at run time and is not listed, or not with a version and a licence."""
    complete = {canonicalize_name(one.name) for one in listed if one.version and one.licence}
    return sorted(run_time - complete)


def _licence(declared: Sequence[Mapping[str, Any]]) -> str:
    """Identifiers where there are any, else what the classifier says, else the first line of the licence's text."""
    ids = [str(one.get("expression") or one["license"].get("id") or "") for one in declared]
    names = [one["license"].get("name", "") for one in declared if "license" in one]
    spoken = [name.rsplit(" :: ", 1)[-1] for name in names if " :: " in name]
    texts = [one["license"]["text"] for one in declared if "text" in one.get("license", {})]
    found = dict.fromkeys([one for one in ids if one] or spoken or [line for line in map(_first_line, texts) if line])
    return "; ".join(found)


def _first_line(text: Mapping[str, str]) -> str:
    content = text["content"]
    if text.get("encoding") == "base64":
        content = base64.b64decode(content).decode("utf-8", "replace")
    return next((line.strip() for line in content.splitlines() if line.strip()), "")[:80]


def main(sbom_file: Path, out: Path) -> int:
    """Write the list, and say what is missing on it."""
    run_time = run_time_names()
    listed = licences(json.loads(sbom_file.read_text(encoding="utf-8")), run_time)
    width = max(len(one.name) + len(one.version) for one in listed) + 2
    rows = [
        f"{one.name + ' ' + one.version:{width}}{one.licence or 'none declared'}" for one in listed if one.at_run_time
    ]
    rows += ["", "Only to build and test:", ""]
    rows += [f"{one.name + ' ' + one.version:{width}}{one.licence or '?'}" for one in listed if not one.at_run_time]
    out.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(
        f"{sbom_file}: {len(run_time)} distributions at run time, {len(listed) - len(run_time)} tools; licences: {out}"
    )
    lacking = missing(listed, run_time)
    if lacking:
        print(f"without a licence or a version: {', '.join(lacking)}", file=sys.stderr)
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
