"""Policies are pure: an AST test over every folder called `policy`, and the pool's ledger (docs/architecture.md)."""

import ast
from pathlib import Path

import pytest

from tests import ROOT

FORBIDDEN = {"time", "threading", "asyncio", "torch", "zmq", "sqlalchemy", "logging", "random", "os"}
WALKERS = {"list", "tuple", "iter", "next", "enumerate", "zip", "map", "dict"}


def policy_files() -> list[Path]:
    folders = [
        folder
        for room in ("daemon", "experts", "routing_rules", "tools")
        for folder in (ROOT / room).rglob("policy")
        if folder.is_dir()
    ]
    return sorted([*(file for folder in folders for file in folder.rglob("*.py")), ROOT / "experts" / "ledger.py"])


def imported(tree: ast.AST) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or ".")
    return names


def set_iterations(tree: ast.AST) -> list[int]:
    """Lines that walk a set: a literal, a comprehension, a call of set() or frozenset(), or a name given to one."""
    walked: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.comprehension)):
            walked.append(node.iter)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in WALKERS:
            walked += node.args
    named = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and is_set(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return [node.lineno for node in walked if is_set(node) or (isinstance(node, ast.Name) and node.id in named)]


def is_set(node: ast.expr) -> bool:
    if isinstance(node, (ast.Set, ast.SetComp)):
        return True
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"set", "frozenset"}


@pytest.mark.parametrize("file", policy_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_policy_imports_no_clock_no_thread_no_device_and_walks_no_set(file: Path):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = imported(tree)
    assert not [name for name in names if name.split(".")[0] in FORBIDDEN]
    assert set_iterations(tree) == []
