"""Our import packages have common names (docs/architecture.md): nobody else may own them in this environment."""

from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

PACKAGES = ("daemon", "experts", "routing_rules", "tools")
DISTRIBUTION = "coserve"


def foreign_owners() -> dict[str, list[str]]:
    """Our package names that another distribution or folder provides, with its owners. Empty when all is well."""
    owners = packages_distributions()
    found = {name: sorted({o for o in owners.get(name, []) if o != DISTRIBUTION}) for name in PACKAGES}
    home = Path(__file__).resolve().parents[2]
    for name in PACKAGES:
        folder = Path(next(iter(import_module(name).__path__))).resolve()
        if folder.parent != home:
            found[name].append(str(folder))
    return {name: others for name, others in found.items() if others}
