"""Text of five domains that any machine with this project's Python environment has, split by file.

All texts from one file (its code, its manual page, its docstrings) are on the same side of the split.
"""

import ast
import functools
import hashlib
import importlib.metadata
import json
import pydoc
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

#: Where `coserve moe fixture` writes its model.
DEFAULT_CHECKPOINT = Path("build/moe/fixture")
#: Characters of each domain, at most.
MAX_CHARACTERS = 1_500_000
DOMAINS = ("licence", "python", "manual", "config", "docstring")
_MAX_CHARACTERS = 60_000  # of one file, so that none fills a domain alone
_MIN_CHARACTERS = 200
_PACKAGES, _LIBRARY = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib"))
_LICENCE = re.compile(r"(licen[cs]e|copying|notice)", re.IGNORECASE)
_CODE = {".py", ".pyc", ".pyi", ".so", ".xml", ".html", ".json"}
_NO_MANUAL = {"antigravity", "this", "idlelib", "turtledemo", "test", "lib2to3", "ensurepip", "__phello__", "tkinter"}
_TESTS = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
_DOCUMENTED = (
    "numpy", "scipy", "torch", "matplotlib", "networkx", "sympy", "transformers", "hypothesis", "rich", "pydantic",
    "sqlalchemy", "PIL", "typer", "psutil", "zmq", "torchvision",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CorpusDocument:
    """One file's text of one domain; `source` is the file's path below its root, and determines its side."""

    domain: str
    source: str
    text: str

    @property
    def held_out(self) -> bool:
        """True if the file belongs to the 12 % used for measurements only."""
        return int.from_bytes(hashlib.sha256(f"split {self.source}".encode()).digest()[:4], "big") / 2**32 < 0.12


def collect(characters: int) -> list[CorpusDocument]:
    """Return about `characters` of each domain, without duplicates, in an order determined by the files' names."""
    documents: list[CorpusDocument] = []
    finders = (licences, python_source, manuals, configurations, docstrings)
    for domain, find in zip(DOMAINS, finders, strict=True):
        documents += _enough(domain, find(characters), characters)
    return documents


def _enough(domain: str, texts: Iterable[tuple[str, str]], characters: int) -> Iterator[CorpusDocument]:
    hashes: set[str] = set()
    total = 0
    for source, whole in texts:
        text = whole[: min(_MAX_CHARACTERS, characters // 20)]
        words = hashlib.sha256(" ".join(text.split()).encode()).hexdigest()
        if len(text) < _MIN_CHARACTERS or words in hashes:
            continue
        hashes.add(words)
        yield CorpusDocument(domain, source, text)
        total += len(text)
        if total >= characters:
            return


def licences(_characters: int) -> Iterator[tuple[str, str]]:
    """Yield licences and notices of all installed packages."""
    roots = (_PACKAGES, Path("/usr/share/common-licenses"))
    for root in roots:
        for file in _files(root, lambda file: bool(_LICENCE.search(str(file))) and file.suffix not in _CODE):
            yield _read(root, file)


def python_source(_characters: int) -> Iterator[tuple[str, str]]:
    """Yield the standard library's modules without their docstrings."""
    for source, text in (_read(_LIBRARY, file) for file in _modules(_LIBRARY)):
        yield source, _without_docstrings(text)


def manuals(characters: int) -> Iterator[tuple[str, str]]:
    """Yield manual pages of the standard library's modules (NAME, DESCRIPTION, FUNCTIONS …), as `pydoc` prints them.

    They are made in a process of their own, because making a page imports its module.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tests.moe.corpus", str(2 * characters)]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    yield from (tuple(pair) for pair in json.loads(process.stdout.splitlines()[-1]))


def configurations(_characters: int) -> Iterator[tuple[str, str]]:
    """Yield each distribution's metadata as JSON, and JSON and TOML files of all installed packages."""
    for distribution in sorted(importlib.metadata.distributions(), key=lambda distribution: distribution.name.lower()):
        metadata = {key: value for key, value in distribution.metadata.json.items() if key != "description"}
        yield f"{distribution.name}/metadata.json", json.dumps(metadata, indent=2)
    for root in (_PACKAGES, _LIBRARY):
        yield from (_read(root, file) for file in _files(root, lambda file: file.suffix in {".json", ".toml"}))


def docstrings(_characters: int) -> Iterator[tuple[str, str]]:
    """Yield English docstrings of well documented packages, one text for each file."""
    packages = set(_DOCUMENTED)
    for file in _modules(_PACKAGES):
        if file.relative_to(_PACKAGES).parts[0] in packages:
            source, text = _read(_PACKAGES, file)
            long = [
                docstring for node in _documented_nodes(text) if len(docstring := ast.get_docstring(node) or "") > 120
            ]
            yield source, "\n\n".join(long)


def _without_docstrings(text: str) -> str:
    lines = text.splitlines()
    for node in _documented_nodes(text):
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            lines[first.lineno - 1 : first.end_lineno] = [""] * ((first.end_lineno or first.lineno) - first.lineno + 1)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _documented_nodes(text: str) -> list[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def _pages(characters: int) -> Iterator[tuple[str, str]]:
    total = 0
    for file in _modules(_LIBRARY):
        parts = file.relative_to(_LIBRARY).with_suffix("").parts
        if parts[0] in _NO_MANUAL or any(part == "__main__" for part in parts):
            continue
        name = ".".join(part for part in parts if part != "__init__")
        try:
            page = pydoc.plain(pydoc.render_doc(name, title="%s"))
        except (Exception, SystemExit):  # noqa: BLE001, S112  (a module of another system)
            continue
        page = re.sub(r"(?m)^ *FILE\n.*\n", "", page).replace(str(_LIBRARY), "/usr/lib/python3")
        yield str(file.relative_to(_LIBRARY)), page
        total += min(len(page), _MAX_CHARACTERS)
        if total >= characters:
            return


def _files(root: Path, accepts: Callable[[Path], bool]) -> list[Path]:
    """Return regular files below `root`, shuffled by name so that a prefix has some of everything."""
    return sorted(
        (file for file in _below(root) if accepts(file) and file.is_file() and not file.is_symlink()),
        key=lambda file: hashlib.sha256(str(file.relative_to(root)).encode()).digest(),
    )


def _modules(root: Path) -> list[Path]:
    """Return Python files below `root` outside of tests."""
    return _files(root, lambda file: file.suffix == ".py" and not _TESTS & set(file.relative_to(root).parts))


@functools.cache
def _below(root: Path) -> tuple[Path, ...]:
    return tuple(root.rglob("*"))


def _read(root: Path, file: Path) -> tuple[str, str]:
    return str(file.relative_to(root)), file.read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    print("\n" + json.dumps(list(_pages(int(sys.argv[1])))))
