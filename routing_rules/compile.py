"""Rules text to immutable `Routes`, or every mistake in it."""

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from routing_rules.catalog_check import ExpertLabels, check_experts
from routing_rules.check import Findings, check_rules
from routing_rules.document import Document, Problem, read_yaml_text
from routing_rules.load import salvage
from routing_rules.routes import (
    COMPONENT,
    AlarmRule,
    ClassifierStep,
    DetectorStep,
    Pattern,
    Position,
    Recipe,
    Requirement,
    Routes,
    Step,
    chain,
    for_component,
)
from routing_rules.schema import BoardEntry, ClassifierEntry, DetectorEntry, Glob, RequirementEntry, RulesFile

__all__ = ["ExpertLabels", "RulesError", "compile_rules"]


class RulesError(Exception):
    """The rules cannot be used: every mistake in them, in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(map(str, self.problems)))


def compile_rules(
    source: Document | str, name: str = "rules", experts: Mapping[str, ExpertLabels] | None = None
) -> Routes:
    """Compile a document, or a text called `name`; check experts if given. RulesError has all mistakes."""
    document = source if isinstance(source, Document) else read_yaml_text(source, name)
    rules, problems, removed = salvage(RulesFile, document)
    findings = Findings(document, removed, problems)
    if rules is not None:
        check_rules(rules, findings)
        check_experts(rules, findings, experts)
        problems = sorted(dict.fromkeys(findings.problems))
    if rules is None or problems:
        raise RulesError(problems)
    return _Compiler(rules, experts).routes(document.text, sorted(dict.fromkeys(findings.warnings)))


class _Compiler:
    """Turns sound rules into steps; an entry that several chains share becomes one step."""

    def __init__(self, rules: RulesFile, experts: Mapping[str, ExpertLabels] | None) -> None:
        self._rules = rules
        self._experts = experts
        self._codes: Mapping[str, str] = MappingProxyType(dict(rules.defects))
        self._named: dict[str, Step] = {}

    def routes(self, text: str, warnings: Sequence[Problem]) -> Routes:
        patterns = tuple(
            Pattern(glob, Glob.of(glob).regex, self._classifier(glob, entry))
            for glob, entry in self._rules.classifiers.items()
        )
        recipes = {name: _recipe(name, board) for name, board in self._rules.boards.items()}
        firsts = _first_steps(recipes, patterns)
        flow = _ChainUsage(recipes, firsts)
        # An extra component may need any classifier, so those that are named outright count as used.
        names = dict.fromkeys(flow.runs)
        if any(recipe.extras_allowed for recipe in recipes.values()):
            parts = [part for pattern in patterns for part in chain(pattern.step)]
            names |= dict.fromkeys(part.expert for part in parts if COMPONENT not in part.expert)
        experts = self._experts
        return Routes(
            text=text,
            sha256=hashlib.sha256(text.encode()).hexdigest(),
            recipes=MappingProxyType(recipes),
            first_steps=MappingProxyType({name: MappingProxyType(steps) for name, steps in firsts.items()}),
            patterns=patterns,
            tasks=None if experts is None else MappingProxyType({name: experts[name].task for name in experts}),
            experts=tuple(names),
            usage=MappingProxyType({name: min(1.0, flow.runs.get(name, 0.0)) for name in names}),
            successors=MappingProxyType({name: flow.successors(name) for name in names}),
            alarms=tuple(AlarmRule(name, **dict(alarm)) for name, alarm in self._rules.alarms.items()),
            warnings=tuple(map(str, warnings)),
        )

    def _step(self, name: str | None) -> Step | None:
        if name is None:
            return None
        if name not in self._named:
            detector = self._rules.detectors.get(name)
            self._named[name] = (
                self._detector(name, detector) if detector else self._classifier(name, self._rules.steps[name])
            )
        return self._named[name]

    def _classifier(self, name: str, entry: ClassifierEntry) -> ClassifierStep:
        branches, otherwise = self._onward(entry.then)
        if isinstance(entry.then, str):
            # One name is where passing images go; the others fail here.
            branches, otherwise = tuple((label, otherwise) for label in entry.pass_labels), None
        return ClassifierStep(
            name=name,
            expert=entry.expert,
            pass_labels=tuple(entry.pass_labels),
            review_below=entry.review_below,
            branches=branches,
            otherwise=otherwise,
            on_clear=entry.on_clear,
            pass_rate=entry.pass_rate,
            codes=self._codes,
        )

    def _detector(self, name: str, entry: DetectorEntry) -> DetectorStep:
        branches, otherwise = self._onward(entry.then)
        return DetectorStep(
            name=name,
            expert=entry.expert,
            fail_on=tuple(entry.fail_on.items()),
            review_on=tuple(entry.review_on.items()),
            require=tuple(
                _requirement(label, item, entry.review_below)
                for label, requirements in entry.require.items()
                for item in (requirements if isinstance(requirements, list) else [requirements])
            ),
            review_below=entry.review_below,
            branches=branches,
            otherwise=otherwise,
            pass_rate=entry.pass_rate,
            codes=self._codes,
        )

    def _onward(
        self, then: str | dict[str, str | None] | None
    ) -> tuple[tuple[tuple[str, Step | None], ...], Step | None]:
        if not isinstance(then, dict):
            return (), self._step(then)
        branches = tuple((label, self._step(name)) for label, name in then.items() if label != "*")
        return branches, self._step(then.get("*"))


def _requirement(label: str, entry: RequirementEntry, review_below: float) -> Requirement:
    return Requirement(
        label=label,
        minimum=entry.min if entry.min is not None else (1 if entry.max is None else 0),
        maximum=entry.max,
        confidence=review_below if entry.confidence is None else entry.confidence,
        region=entry.region,
        at=entry.position.at if entry.position else None,
        tolerance=entry.position.tolerance if entry.position else 0.0,
    )


def _recipe(board_type: str, board: BoardEntry) -> Recipe:
    positions = {
        component: Position(len(amount), tuple(amount)) if isinstance(amount, list) else Position(amount)
        for component, amount in board.components.items()
    }
    component_at = {designator: name for name, place in positions.items() for designator in place.designators}
    return Recipe(
        *(board_type, MappingProxyType(positions), board.time_limit, board.extras == "allow", board.share),
        MappingProxyType(component_at),
    )


def _first_steps(recipes: Mapping[str, Recipe], patterns: Sequence[Pattern]) -> dict[str, dict[str, Step]]:
    filled: dict[str, Step] = {}
    for recipe in recipes.values():
        for component in recipe.positions:
            if component not in filled:
                pattern = next(item for item in patterns if item.matches.fullmatch(component))
                filled[component] = for_component(pattern.step, component)
    return {name: {component: filled[component] for component in recipe.positions} for name, recipe in recipes.items()}


class _ChainUsage:
    """Probabilities that an image runs an expert, and that it goes from one to another (CoServe §4.5)."""

    def __init__(self, recipes: Mapping[str, Recipe], firsts: Mapping[str, Mapping[str, Step]]) -> None:
        self.runs: dict[str, float] = {}
        self._moves: dict[str, dict[str, float]] = {}
        images = sum(recipe.share * recipe.expected for recipe in recipes.values())
        for name, recipe in recipes.items():
            for component, position in recipe.positions.items():
                self._follow(firsts[name][component], recipe.share * position.quantity / images)

    def _follow(self, first: Step, share_of_images: float) -> None:
        arriving = {id(first): share_of_images}
        for step in chain(first):
            arriving_share = arriving.get(id(step), 0.0)
            self.runs[step.expert] = self.runs.get(step.expert, 0.0) + arriving_share
            moves = self._moves.setdefault(step.expert, {})
            for following, share in step.exits():
                arriving[id(following)] = arriving.get(id(following), 0.0) + arriving_share * share
                moves[following.expert] = moves.get(following.expert, 0.0) + arriving_share * share

    def successors(self, expert: str) -> tuple[tuple[str, float], ...]:
        runs = self.runs.get(expert, 0.0)
        return tuple((to, min(1.0, moved / runs) if runs else 0.0) for to, moved in self._moves.get(expert, {}).items())
