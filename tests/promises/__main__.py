"""`python -m tests.promises [--only WORDS]`: exit status 1 if a break stays unnoticed, or no longer fits the code.

`--list` breaks nothing, and writes build/promises.md from the tests' marks.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

from tests import ROOT
from tests.promises.breaks import BREAKS, Break
from tests.promises.page import LIST, promises, write_list

_COPY = ROOT / "build/promises"
#: A break that hangs is noticed; all tests without a break take longer than those of one.
_BREAK_S, _UNBROKEN_S = 600, 3600
#: A test that could not even begin has noticed nothing.
_NOT_RUN = ("ERROR collecting", "ImportError", "SyntaxError", "NameError", "no tests ran", "not found:")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.promises", description=__doc__)
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="breaks of promises with these words, or of this file"
    )
    parser.add_argument("--list", action="store_true", help="write build/promises.md, break nothing")
    options = parser.parse_args()
    if options.list:
        write_list()
        print(LIST)
        return
    words = options.only
    breaks = [item for item in BREAKS if words in item.promise or words in item.file]
    _copy_tree()
    problems = [f"{item.file}: {item.find!r} does not stand in it exactly once" for item in breaks if not _fits(item)]
    problems += _unbroken(sorted({test for item in breaks for test in _tests_of(item)}))
    for item in [] if problems else breaks:
        began_s = time.monotonic()
        is_noticed = _is_noticed(item)
        print("noticed" if is_noticed else "SURVIVED", f"{time.monotonic() - began_s:4.0f} s", item.promise, flush=True)
        if not is_noticed:
            problems.append(f"no test noticed: {item.promise} ({item.file}: {item.find.strip()!r})")
    print(f"{len(breaks)} breaks", *problems, sep="\n")
    sys.exit(bool(problems))


def _copy_tree() -> None:
    """Copy what git tracks, and new files, to build/promises."""
    shutil.rmtree(_COPY, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (_COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, _COPY / name)
    check = "import daemon, coserve_client; print(daemon.__file__, coserve_client.__file__)"
    places = subprocess.run(
        [sys.executable, "-c", check], cwd=_COPY, env=_environment(), check=True, capture_output=True, text=True
    )
    assert places.stdout.count(str(_COPY)) == 2, f"the copy would test another tree: {places.stdout}{places.stderr}"


def _environment() -> dict[str, str]:
    path = f"{_COPY}{os.pathsep}{_COPY / 'tools/client'}"
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _fits(item: Break) -> bool:
    return (_COPY / item.file).read_text(encoding="utf-8").count(item.find) == 1


def _tests_of(item: Break) -> Sequence[str]:
    return item.tests or [promise.test for promise in promises() if promise.text.startswith(item.promise)]


def _unbroken(tests: Sequence[str]) -> list[str]:
    """Return a problem if the tests do not pass as the code is."""
    status, output = _run(tests, _UNBROKEN_S)
    return [] if status == 0 else [f"the tests fail without a break:\n{output[-3000:]}"]


def _is_noticed(item: Break) -> bool:
    file = _COPY / item.file
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(item.find, item.replace), encoding="utf-8")
    try:
        status, output = _run(_tests_of(item), _BREAK_S)
    finally:
        file.write_text(text, encoding="utf-8")
    return status == 1 and not any(words in output for words in _NOT_RUN)


def _run(tests: Sequence[str], within_s: float) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "120", "--tb", "line"]
    try:
        ended = subprocess.run(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=_COPY,
            env=_environment(),
            check=False,
            capture_output=True,
            text=True,
            timeout=within_s,
        )
    except subprocess.TimeoutExpired:
        return 1, f"the tests did not end within {within_s:g} s"
    return ended.returncode, ended.stdout + ended.stderr


if __name__ == "__main__":
    main()
