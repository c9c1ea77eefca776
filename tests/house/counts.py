"""Figures read from the sources: lines, rooms and their imports, commands, keys."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests import ROOT

#: Top folders of the wheel, and what stands in them and is in no wheel (pyproject.toml, `packages.find`).
PRODUCT = ("daemon", "experts", "routing_rules", "tools")
NOT_IN_THE_WHEEL = ("tools/camera/render/", "tools/demo/", "tools/release/", "routing_rules/examples/")


@dataclass(frozen=True)
class Source:
    """A Python file of the repository; `name` is its dotted module name."""

    path: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @property
    def name(self) -> str:
        parts = Path(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def is_test(self) -> bool:
        return self.path.startswith("tests/")

    @property
    def is_product(self) -> bool:
        return self.path.split("/")[0] in PRODUCT and not self.path.startswith(NOT_IN_THE_WHEEL)


def sources() -> list[Source]:
    """Return every Python file of the product and the tests."""
    files = sorted(file for folder in (*PRODUCT, "tests") for file in (ROOT / folder).rglob("*.py"))
    return [Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def rooms_of(files: Iterable[Source]) -> dict[str, str]:
    """Return the room of each module of the product: its folder, `daemon.wire` for `daemon.wire.keys`.

    In a folder that has rooms of its own, such as `daemon/`, each file is one room.
    """
    modules = {file.name: file for file in files if file.is_product}
    folders = {name for name, file in modules.items() if file.path.endswith("__init__.py")}
    with_rooms = {name.rpartition(".")[0] for name in folders}
    return {
        name: name if name in folders or name.rpartition(".")[0] in with_rooms else name.rpartition(".")[0]
        for name in modules
    }


def imports(file: Source, modules: set[str]) -> Iterator[str]:
    """Yield each module of `modules` that `file` imports, anywhere in it."""
    for node in file.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in modules:
                    yield inner
                elif node.module in modules:
                    yield node.module


def arrows(files: Iterable[Source]) -> dict[str, set[str]]:
    """Return, for each room of the product, the other rooms that it imports."""
    room_of = rooms_of(files)
    rooms: dict[str, set[str]] = {}
    for file in files:
        if file.name in room_of and file.is_product:
            room = room_of[file.name]
            rooms.setdefault(room, set()).update({room_of[name] for name in imports(file, set(room_of))} - {room})
    return rooms


def crowded_rooms(files: Iterable[Source], most: int = 15) -> list[str]:
    """The folders of the product with more files than `most`."""
    sizes = Counter(str(Path(file.path).parent) for file in files if file.is_product)
    return [f"{folder}: {size}" for folder, size in sizes.most_common() if size > most]


def commands(group: Any, above: str = "coserve") -> list[str]:
    """The commands of the wheel below a group of click's."""
    names = [f"{above} {name}" for name, each in group.commands.items() if not hasattr(each, "commands")]
    names = [name for name in names if not group.commands[name.split()[-1]].callback.__module__.startswith("tests.")]
    groups = [(name, each) for name, each in group.commands.items() if hasattr(each, "commands")]
    return names + [name for word, each in groups for name in commands(each, f"{above} {word}")]


def keys() -> list[str]:
    """The keys of `coserve.yaml`: a test holds that the page has each once."""
    return re.findall(r"^\| `([\w.]+)` ", (ROOT / "docs/configuration.md").read_text(encoding="utf-8"), re.MULTILINE)
