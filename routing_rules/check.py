"""Checks across the entries of a rules file: patterns, boards, chains, counts.

Each check looks only at parts sound in themselves (`load.salvage`), and adds nothing that a mistake reported elsewhere
explains.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any, cast

from routing_rules.document import Document, KeyPath, Problem, meant, nearest
from routing_rules.routes import MAX_REMEMBERED
from routing_rules.schema import ClassifierEntry, DetectorEntry, Glob, RequirementEntry, RulesFile, is_glob

#: Steps of one chain. Every image of a longer one would take that many experts, each of them a possible switch.
MAX_CHAIN = 16

#: For each entry, the paths of the values in its `then` and the entries they lead to.
Links = dict[KeyPath, list[tuple[KeyPath, KeyPath]]]


@dataclass
class Findings:
    """The mistakes found so far in `document`, what is only odd, and the paths taken out as wrong in themselves."""

    document: Document
    removed: Sequence[KeyPath]
    problems: list[Problem] = field(default_factory=list[Problem])
    warnings: list[Problem] = field(default_factory=list[Problem])

    def add(self, path: KeyPath, message: str, *, key: bool = False) -> None:
        self.problems.append(self.document.problem(path, message, key=key))

    def is_spoilt(self, path: KeyPath) -> bool:
        """Return True if something at or below `path` was taken out: its absence is not a new mistake."""
        return any(gone[: len(path)] == path for gone in self.removed)

    def is_misspelt(self, path: KeyPath) -> bool:
        """Return True if the key of `path` has a wrong value or name, which is reported already."""
        return self.is_spoilt(path) or any(
            gone[:-1] == path[:-1] and nearest(str(gone[-1]), [str(path[-1])]) for gone in self.removed
        )

    def names(self, section: str) -> list[str]:
        """Return the keys of a section as written, wrong entries included."""
        return self.document.keys((section,))

    @cached_property
    def globs(self) -> list[Glob]:
        """The patterns of `classifiers` in their order; empty if one of them is wrong."""
        names = self.names("classifiers")
        return [Glob.of(name) for name in names] if all(map(is_glob, names)) else []

    def line(self, path: KeyPath) -> int:
        return self.document.where(path, key=True)[0]


def check_rules(rules: RulesFile, findings: Findings) -> None:
    for section in ("boards", "classifiers"):
        if not findings.names(section) and not findings.is_misspelt((section,)):
            findings.add((section,), f"no {section}: expected at least one entry under `{section}:`", key=True)
    _check_designators(findings)
    _check_patterns(findings)
    _check_components(rules, findings)
    for path, entry in entries(rules):
        if not entry.expert and not findings.is_misspelt((*path, "expert")):
            findings.add(path, "missing key `expert`", key=True)
        if isinstance(entry, ClassifierEntry):
            _check_classifier(path, entry, findings)
        else:
            _check_detector(path, entry, findings)
    _check_alarms(rules, findings)
    _check_chains(rules, findings)


def entries(rules: RulesFile) -> Iterator[tuple[KeyPath, ClassifierEntry | DetectorEntry]]:
    for pattern, entry in rules.classifiers.items():
        yield ("classifiers", pattern), entry
    for name, detector in rules.detectors.items():
        yield ("detectors", name), detector
    for name, entry in rules.steps.items():
        yield ("steps", name), entry


def onward(path: KeyPath, entry: ClassifierEntry | DetectorEntry) -> list[tuple[KeyPath, str]]:
    """Return the names that `then` leads to, each with the path of its value."""
    if isinstance(entry.then, str):
        return [((*path, "then"), entry.then)]
    return [((*path, "then", label), name) for label, name in (entry.then or {}).items() if name is not None]


def _check_designators(findings: Findings) -> None:
    """Check the lists as written, since a list with one wrong item is taken out as a whole."""
    document = findings.document
    for board_type in findings.names("boards"):
        first: dict[str, KeyPath] = {}
        components = ("boards", board_type, "components")
        for component in document.keys(components):
            listed = document.value((*components, component))
            for index, designator in enumerate(cast("list[Any]", listed) if isinstance(listed, list) else ()):
                path = (*components, component, index)
                if isinstance(designator, str) and designator in first:
                    place = first[designator]
                    where = f"line {findings.line(place)}" + (f", `{place[3]}`" if place[3] != component else "")
                    findings.add(path, f"designator `{designator}` is already in {where}: expected once per board")
                elif isinstance(designator, str):
                    first[designator] = path


def _check_patterns(findings: Findings) -> None:
    """Report patterns that an earlier one covers: they never match first."""
    earlier: list[Glob] = []
    for pattern in filter(is_glob, findings.names("classifiers")):
        glob = Glob.of(pattern)
        if (cover := next((one for one in earlier if one.covers(glob)), None)) is not None:
            line = findings.line(("classifiers", cover.text))
            findings.add(
                ("classifiers", pattern),
                f"unreachable: `{cover.text}` (line {line}) already matches all that `{pattern}` matches, and the first"
                " match wins; put the narrower pattern first",
                key=True,
            )
        earlier.append(glob)


def _check_components(rules: RulesFile, findings: Findings) -> None:
    globs = findings.globs
    for board_type, board in rules.boards.items() if globs else ():
        for component in board.components:
            if not any(glob.matches(component) for glob in globs):
                findings.add(
                    ("boards", board_type, "components", component),
                    f"no classifier pattern matches component `{component}`" + _nearest_pattern(component, globs),
                    key=True,
                )


def _nearest_pattern(component: str, globs: Sequence[Glob]) -> str:
    def likeness(glob: Glob) -> float:
        return SequenceMatcher(None, component[: len(glob.head)].casefold(), glob.head.casefold()).ratio()

    best = max((glob for glob in globs if glob.head), key=likeness, default=None)
    if best is None or likeness(best) < 0.6:
        return "; expected one under `classifiers:` that does"
    return f"; the nearest is `{best.text}`"


def _check_classifier(path: KeyPath, entry: ClassifierEntry, findings: Findings) -> None:
    for index, label in enumerate(entry.pass_labels):
        if label in entry.pass_labels[:index]:
            findings.add((*path, "pass", index), f"label `{label}` is already in this list: expected each once")
    branches = isinstance(entry.then, dict) and any(entry.then.values())
    if not entry.pass_labels and not (branches and entry.on_clear == "pass") and not findings.is_spoilt(path):
        hint = ", or `on_clear: pass` to let the step behind it decide" if branches else ""
        findings.add(path, f"no image can pass `{path[1]}`: expected labels such as `pass: [ok]`{hint}", key=True)


def _check_detector(path: KeyPath, entry: DetectorEntry, findings: Findings) -> None:
    if not (entry.fail_on or entry.review_on or entry.require or entry.then or findings.is_spoilt(path)):
        message = f"detector `{path[1]}` decides nothing: expected at least one of fail_on, review_on, require, then"
        findings.add(path, message, key=True)
    for label, threshold in entry.review_on.items():
        if label in entry.fail_on and threshold >= entry.fail_on[label]:
            findings.add(
                (*path, "review_on", label),
                f"expected less than the {entry.fail_on[label]:g} from which `{label}` fails "
                f"(line {findings.line((*path, 'fail_on', label))}): at {threshold:g} it can never be a review",
            )
    for at, requirement in requirements(path, entry):
        _check_requirement(at, requirement, findings)


def requirements(path: KeyPath, entry: DetectorEntry) -> Iterator[tuple[KeyPath, RequirementEntry]]:
    for label, requirement in entry.require.items():
        if isinstance(requirement, RequirementEntry):
            yield (*path, "require", label), requirement
        else:
            yield from (((*path, "require", label, index), each) for index, each in enumerate(requirement))


def _check_requirement(path: KeyPath, entry: RequirementEntry, findings: Findings) -> None:
    if entry.min is not None and entry.max is not None and entry.min > entry.max:
        findings.add((*path, "min"), f"a count that cannot be: min {entry.min} is more than max {entry.max}")
    elif entry.min == 0 and entry.max is None and not findings.is_spoilt(path):
        findings.add((*path, "min"), "min 0 requires nothing: expected min of 1 or more, or a max")
    if entry.region and entry.position:
        x1, y1, x2, y2 = entry.region
        x, y = entry.position.at
        if not (x1 <= x <= x2 and y1 <= y <= y2):
            findings.add((*path, "position", "at"), "expected a point inside this entry's region")


def _check_alarms(rules: RulesFile, findings: Findings) -> None:
    parts = [part for board in rules.boards.values() for part in board.components.items()]
    places = sum(amount if isinstance(amount, int) else len(amount) for _, amount in parts)
    names = dict.fromkeys(name for name, _ in parts)
    may_have_others = any(board.extras == "allow" for board in rules.boards.values())
    for name, entry in rules.alarms.items():
        path, (size, unit, _), at_place = ("alarms", name), entry.within, "designator" in entry.same
        if entry.count > size and (unit == "images" or (unit == "boards" and at_place)):
            findings.add((*path, "count"), f"it can never be raised: expected at most {size:g}, the {unit} of `within`")
        if at_place and unit != "seconds" and places * size > MAX_REMEMBERED:
            message = f"expected {MAX_REMEMBERED // places} {unit} or fewer: the boards have {places} designators"
            findings.add((*path, "within"), message)
        glob = Glob.of(entry.component or "*")
        if names and not may_have_others and not any(map(glob.matches, names)):
            message = f"no component of `boards` matches `{glob.text}`{meant(glob.text, names)}"
            findings.add((*path, "component"), message)


def _check_chains(rules: RulesFile, findings: Findings) -> None:
    named: dict[str, KeyPath] = {}
    for section in ("detectors", "steps"):
        for name in findings.names(section):
            if name in named:
                where = f"line {findings.line(named[name])}"
                message = f"`{name}` is already the name of an entry of detectors, {where}: expected another name"
                findings.add((section, name), message, key=True)
            named.setdefault(name, (section, name))
    links: Links = {}
    for path, entry in entries(rules):
        links[path] = []
        for at, name in onward(path, entry):
            if name in named:
                links[path].append((at, named[name]))
            else:
                findings.add(at, _undefined(name, named, rules))
    _check_cycles(links, findings)


def _undefined(name: str, named: dict[str, KeyPath], rules: RulesFile) -> str:
    message = f"`{name}` is not an entry of detectors or steps"
    by_expert = [path[1] for path, entry in entries(rules) if path[0] != "classifiers" and entry.expert == name]
    if by_expert:
        return f"{message} but an expert; did you mean `{by_expert[0]}`?"
    if name in rules.classifiers and nearest(name, named) is None:
        return f"{message} but a pattern of classifiers: a later classifier goes under `steps:`"
    return message + meant(name, named)


def _check_cycles(links: Links, findings: Findings) -> None:
    """Search depth first with our own stack; report a cycle at the `then` that closes it."""
    lengths: dict[KeyPath, int] = {}
    for first in links:
        # The entries of the walk, in order, each with what is still to be followed from it.
        walk = {first: iter(links[first])} if first not in lengths else {}
        while walk:
            path = next(reversed(walk))
            at, to = next(walk[path], (None, path))
            if at is None:
                lengths[path] = 1 + max((lengths.get(following, 0) for _, following in links.get(path, ())), default=0)
                del walk[path]
            elif to in walk:
                members = list(walk)
                names = " → ".join(str(member[1]) for member in (*members[members.index(to) :], to))
                findings.add(at, f"a cycle: {names}; a chain must end")
            elif to not in lengths:
                walk[to] = iter(links.get(to, ()))
    for path, length in lengths.items():
        if length > MAX_CHAIN and path[0] == "classifiers":
            findings.add((*path, "then"), f"a chain of {length} steps: expected at most {MAX_CHAIN}")
