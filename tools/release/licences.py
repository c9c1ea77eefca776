"""Lists every distribution of this environment with its licence, beside the SBOM that CycloneDX's own tool writes.

`python -m tools.release.licences build/licences.txt` (part of `make sbom`) ends with 1 where a licence is missing.
"""

import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path


def licence_of(package: Distribution) -> str:
    """Return its licence expression, else what its classifiers say, else the first line of its licence; or nothing."""
    told = package.metadata
    spoken = [name.rpartition(" :: ")[2] for name in told.get_all("Classifier", []) if name.startswith("License :: ")]
    ways = [*told.get_all("License-Expression", []), "; ".join(spoken), *told.get_all("License", [])]
    return next(filter(None, map(str.strip, ways)), "").partition("\n")[0][:80]


def main(out: Path) -> int:
    packages = {package.name: package for package in distributions()}
    told = {name: licence_of(packages[name]) for name in sorted(packages, key=str.lower)}
    width = max(map(len, told)) + 2
    rows = [f"{name:{width}}{packages[name].version:18}{told[name] or 'none declared'}" for name in told]
    out.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{len(rows)} distributions with their licences: {out}")
    if lacking := [name for name in told if not told[name]]:
        print(f"without a licence: {', '.join(lacking)}", file=sys.stderr)
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
