"""Checks rules against the catalog: experts exist, do the task they are named for, and have the labels used."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from routing_rules.check import Findings, entries, onward, requirements
from routing_rules.document import KeyPath, meant
from routing_rules.routes import ANY_LABEL, COMPONENT, Task
from routing_rules.schema import ClassifierEntry, DetectorEntry, Glob, RequirementEntry, RulesFile

_KIND: dict[Task, str] = {"classify": "classifier", "detect": "detector"}
Entry = ClassifierEntry | DetectorEntry


@dataclass(frozen=True, slots=True)
class ExpertLabels:
    """`floor` is the confidence below which a detector reports no box."""

    task: Task
    classes: tuple[str, ...]
    floor: float = 0.0


@dataclass(frozen=True, slots=True)
class _Use:
    """One expert at one entry; `by` is the path of the first component that leads to it, None without."""

    path: KeyPath
    entry: Entry
    expert: str
    by: KeyPath | None

    @property
    def task(self) -> Task:
        return "classify" if isinstance(self.entry, ClassifierEntry) else "detect"


def check_experts(rules: RulesFile, findings: Findings, experts: Mapping[str, ExpertLabels] | None) -> None:
    """Add every mistake about experts; without a catalog only those that the rules themselves contradict."""
    uses = list(_uses(rules, findings.globs))
    if experts is None:
        _check_tasks(uses, findings)
        return
    right = [use for use in uses if use.expert in experts and experts[use.expert].task == use.task]
    for use in uses:
        if use.expert not in experts:
            for_whom = _for_whom(use, findings)
            message = f"no expert `{use.expert}` in the catalog{for_whom}{meant(use.expert, experts)}"
            if for_whom:
                message += "; not trained yet? Train into another folder until no component lacks its expert"
            findings.add((*use.path, "expert"), message)
        elif experts[use.expert].task != use.task:
            kind, expected = _KIND[experts[use.expert].task], _KIND[use.task]
            where = "under `detectors:`" if kind == "detector" else "under `classifiers:` or `steps:`"
            message = f"expert `{use.expert}` is a {kind}, expected a {expected}; a {kind} goes {where}"
            findings.add((*use.path, "expert"), message)
    _check_labels(right, findings, experts)
    for use in right:
        if isinstance(use.entry, DetectorEntry):
            _check_detector(use, use.entry, findings, experts[use.expert])
    if len(right) == len(uses) and not findings.removed:
        _check_defects(rules, right, findings, experts)


def _for_whom(use: _Use, findings: Findings) -> str:
    if use.by is None or COMPONENT not in use.entry.expert:
        return ""
    return f" (for component `{use.by[3]}` of board `{use.by[1]}`, line {findings.line(use.by)})"


def _uses(rules: RulesFile, globs: Sequence[Glob]) -> Iterator[_Use]:
    """Yield every expert that a recipe's component leads to, and those named outright, once per entry."""
    named = {path[1]: (path, entry) for path, entry in reversed(list(entries(rules))) if path[0] != "classifiers"}
    components = _components_by_pattern(rules, globs)
    listed: dict[tuple[KeyPath, str], None] = {}
    for pattern, classifier in rules.classifiers.items():
        for path, entry in _reachable(("classifiers", pattern), classifier, named):
            if not entry.expert:
                continue
            # Without a placeholder one component stands for all.
            some = components[pattern] if COMPONENT in entry.expert else components[pattern][:1]
            for by in some:
                expert = entry.expert.replace(COMPONENT, str(by[3]))
                if (path, expert) not in listed:
                    listed[path, expert] = None
                    yield _Use(path, entry, expert, by)
    for path, entry in entries(rules):
        if entry.expert and COMPONENT not in entry.expert and (path, entry.expert) not in listed:
            yield _Use(path, entry, entry.expert, None)


def _components_by_pattern(rules: RulesFile, globs: Sequence[Glob]) -> dict[str, list[KeyPath]]:
    """Return the components that each pattern matches first; a wrong entry keeps its own from later ones."""
    places: defaultdict[str, list[KeyPath]] = defaultdict(list)
    known: set[str] = set()
    for board_type, board in rules.boards.items():
        for component in [name for name in board.components if name not in known]:
            known.add(component)
            if first := next((glob for glob in globs if glob.matches(component)), None):
                places[first.text].append(("boards", board_type, "components", component))
    return places


def _reachable(
    path: KeyPath, entry: Entry, named: Mapping[str | int, tuple[KeyPath, Entry]]
) -> list[tuple[KeyPath, Entry]]:
    entries: dict[KeyPath, Entry] = {path: entry}
    pending = [(path, entry)]
    while pending:
        for _, name in onward(*pending.pop()):
            if name in named and named[name][0] not in entries:
                entries[named[name][0]] = named[name][1]
                pending.append(named[name])
    return list(entries.items())


def _check_tasks(uses: list[_Use], findings: Findings) -> None:
    first: dict[str, _Use] = {}
    for use in uses:
        earlier = first.setdefault(use.expert, use)
        if earlier.task != use.task:
            line = findings.line((*earlier.path, "expert"))
            message = (
                f"expert `{use.expert}` is used as a {_KIND[earlier.task]} in line {line}: expected a {_KIND[use.task]}"
            )
            findings.add((*use.path, "expert"), message)


def _check_labels(uses: list[_Use], findings: Findings, experts: Mapping[str, ExpertLabels]) -> None:
    """Add one problem for each label in the file, however many experts of a template lack it."""
    lacking: dict[tuple[KeyPath, bool], list[tuple[str, str]]] = {}
    for use in uses:
        for path, label, is_key in _labels(use):
            if label not in experts[use.expert].classes:
                lacking.setdefault((path, is_key), []).append((label, use.expert))
    for (path, is_key), those in lacking.items():
        label, expert = those[0]
        more = f" (nor have {len(those) - 1} others)" if len(those) > 1 else ""
        message = f"expert `{expert}` has no label `{label}`{more}" + meant(label, experts[expert].classes)
        findings.add(path, message, key=is_key)


def _check_detector(use: _Use, entry: DetectorEntry, findings: Findings, expert: ExpertLabels) -> None:
    """Add thresholds that no box can be below, and warn of classes that decide nothing."""
    thresholds: dict[KeyPath, float | None] = {
        **{(*use.path, "fail_on", label): least for label, least in entry.fail_on.items()},
        **{(*use.path, "review_on", label): least for label, least in entry.review_on.items()},
        **{(*at, "confidence"): requirement.confidence for at, requirement in requirements(use.path, entry)},
    }
    for at, least in thresholds.items():
        if least and least < expert.floor:
            no_box = f"expert `{use.expert}` reports no box below {expert.floor:g}, its confidence_floor in the catalog"
            findings.add(at, f"{no_box}: expected {expert.floor:g} or more here, or a floor of {least:g} or less")
    named = {*entry.fail_on, *entry.review_on, *entry.require, *(entry.then if isinstance(entry.then, dict) else ())}
    for index, label in enumerate(entry.ignore):
        if label in named:
            findings.add((*use.path, "ignore", index), f"another key names `{label}`: expected one that none names")
    unnamed = [f"`{label}`" for label in expert.classes if label not in named and label not in entry.ignore]
    if unnamed and ANY_LABEL not in {**entry.fail_on, **entry.review_on}:
        names = ", ".join(unnamed[:5]) + (f" and {len(unnamed) - 5} more" if len(unnamed) > 5 else "")
        text = f"no key names {names} of expert `{use.expert}`, so boxes of it decide nothing: name it under fail_on or"
        text += " review_on, or under ignore if that is meant"
        findings.warnings.append(findings.document.problem(use.path, text, key=True))


def _labels(use: _Use) -> Iterator[tuple[KeyPath, str, bool]]:
    if isinstance(use.entry, ClassifierEntry):
        for index, label in enumerate(use.entry.pass_labels):
            yield (*use.path, "pass", index), label, False
    else:
        for section, labels in (
            ("fail_on", use.entry.fail_on),
            ("review_on", use.entry.review_on),
            ("require", use.entry.require),
        ):
            for label in labels:
                if label != ANY_LABEL:
                    yield (*use.path, section, label), label, True
        for index, label in enumerate(use.entry.ignore):
            yield (*use.path, "ignore", index), label, False
    if isinstance(use.entry.then, dict):
        for label in use.entry.then:
            if label != ANY_LABEL:
                yield (*use.path, "then", label), label, True


def _check_defects(rules: RulesFile, uses: list[_Use], findings: Findings, experts: Mapping[str, ExpertLabels]) -> None:
    extras = any(board.extras == "allow" for board in rules.boards.values())
    names = list(experts) if extras else [use.expert for use in uses]
    right = dict.fromkeys(label for name in names for label in experts[name].classes)
    for detector in rules.detectors.values():
        for label, requirement in detector.require.items():
            right |= dict.fromkeys(requirement_defects(label, requirement))
    for label in rules.defects:
        if label not in right:
            message = f"no expert of these rules has the label `{label}`" + meant(label, right)
            findings.add(("defects", label), message, key=True)


def requirement_defects(label: str, requirement: RequirementEntry | list[RequirementEntry]) -> list[str]:
    """Return the defects of a required label; they take codes in `defects` as labels do."""
    several = requirement if isinstance(requirement, list) else [requirement]
    kinds = ["missing", "extra"] + ["misplaced"] * any(entry.region or entry.position for entry in several)
    return [f"{kind}_{label}" for kind in kinds]
