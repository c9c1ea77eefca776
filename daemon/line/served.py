"""An edition, compiled: the rules and experts that boards are judged by."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from daemon.errors import ConfigError
from experts.catalog import Catalog, CatalogEntry, CatalogFile, resolve
from experts.editions.edition import Edition
from experts.editions.folder import EditionFolder
from routing_rules.compile import ExpertLabels, RulesError, compile_rules
from routing_rules.load import read_yaml_text
from routing_rules.routes import Routes

#: The least time for which a replaced edition goes on judging the boards that began in it.
_SERVES_S = 600.0


@dataclass(frozen=True, slots=True)
class Served:
    """`catalog` keeps an expert whose weights are missing or damaged: only its images are `unknown`."""

    edition: Edition
    routes: Routes
    catalog: Catalog

    @property
    def number(self) -> int:
        return self.edition.number

    @property
    def serves_s(self) -> float:
        """Seconds that it serves once it is replaced: its longest time limit of a board, ten minutes at least."""
        return max(_SERVES_S, *(recipe.time_limit_s or 0.0 for recipe in self.routes.recipes.values()), 0.0)


def compile_stored(edition: Edition, folder: EditionFolder) -> Served:
    return compile_edition(edition, folder.absolute_entries(edition), folder.root, is_new=False)


def compile_edition(
    edition: Edition, experts: Mapping[str, CatalogEntry], root: Path, *, is_new: bool = True
) -> Served:
    """Compile an edition with the weights that `experts` name. Raises ConfigError with every mistake.

    One that is in force already serves on with settings that contradict each other.
    """
    kept = ("file",) if is_new else ("file", "temperature")
    what = f"edition {edition.number}"
    catalog, mistakes = resolve(CatalogFile(experts=dict(experts)), root)
    problems = [f"{what}: {'.'.join(map(str, where))}: {text}" for where, text in mistakes if where[-1] not in kept]
    try:
        document = read_yaml_text(edition.rules, f"{what}, rules", refuse_hidden=True)
        routes = compile_rules(document, document.name, labels_of(catalog or None, floors=is_new))
    except RulesError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return Served(edition, routes, catalog)


def labels_of(catalog: Catalog | None, *, floors: bool = True) -> Mapping[str, ExpertLabels] | None:
    if catalog is None:
        return None
    return {
        spec.name: ExpertLabels(spec.task, spec.classes, spec.confidence_floor if floors else 0.0)
        for spec in catalog.values()
        if spec.classes
    }
