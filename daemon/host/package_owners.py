"""The owners of our import packages, which have common names (docs/architecture.md), in this environment."""

from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

#: The distributions that may own each package. The camera's side is also one of its own.
OWNERS = {name: {"coserve"} for name in ("daemon", "experts", "routing_rules", "tools")}
OWNERS["coserve_client"] = {"coserve", "coserve-client"}


def foreign_owners() -> dict[str, list[str]]:
    """Return the other distributions and folders that provide a package of ours, by package; empty if all is well."""
    distributions = packages_distributions()
    home = Path(__file__).resolve().parents[2]
    foreign: dict[str, list[str]] = {}
    for name, owners in OWNERS.items():
        others = sorted(set(distributions.get(name, [])) - owners)
        folder = Path(next(iter(import_module(name).__path__))).resolve()
        if folder.parent not in (home, home / "tools" / "client"):
            others.append(str(folder))
        if others:
            foreign[name] = others
    return foreign
