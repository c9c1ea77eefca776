"""Run what people in the field brought, and print beside each case what was right before and is right now.

A case is a folder with `try.sh`; `got.txt` there is what an earlier version printed. `checks.yaml` says what the output
must and must not have. Exit status 1 if a case is wrong or has no checks.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.waiting import until

ROOT = Path(__file__).parents[2]
OUTPUTS, OWN = ROOT / "build" / "field", Path(__file__).parent / "cases"
_CASE_S, _START_S = 1200, 300.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.field", description=__doc__)
    parser.add_argument("--cases", type=Path, default=ROOT.parent / "shared" / "data" / "field")
    parser.add_argument("--line", type=Path, default=ROOT / "demo", help="a line that `coserve demo` made")
    parser.add_argument("--only", default="", help="cases whose names begin so")
    options = parser.parse_args()
    checks: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "checks.yaml").read_text(encoding="utf-8"))
    cases = sorted((*options.cases.glob("[0-9]*"), *OWN.glob("[0-9]*")), key=lambda folder: folder.name)
    cases = [case for case in cases if case.name.startswith(options.only)]
    line = OUTPUTS / "line"
    environ = os.environ | {"COSERVE": str(Path(sys.executable).parent / "coserve"), "PYTHON": sys.executable}
    environ |= {"PRODUCT": str(ROOT), "LINE": str(line / "coserve.yaml"), "COLUMNS": "200"}
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    if not line.exists():
        subprocess.run(["bash", options.cases / "line.sh", options.line, line], check=True)
    wrong = 0
    with (OUTPUTS / "daemon.log").open("wb") as log:
        daemon = subprocess.Popen([environ["COSERVE"], "run", line / "coserve.yaml"], stdout=log, stderr=log)
        try:
            until(lambda: _run(environ, "status", line / "coserve.yaml").returncode == 0, patience_s=_START_S)
            _run(environ, "reload", line / "coserve.yaml").check_returncode()
            for case in cases:
                found = _missing(_output(case, environ), checks.get(case.name))
                wrong += bool(found)
                old = case / "got.txt"
                before = _missing(old.read_text(encoding="utf-8"), checks.get(case.name)) if old.exists() else []
                print(f"{case.name:30} before: {'wrong' if before else 'right'}  now: {'wrong' if found else 'right'}")
                print(*(f"    {each}" for each in found), sep="\n", end="\n" if found else "", flush=True)
        finally:
            daemon.terminate()
            daemon.wait()
    print(f"{len(cases)} cases, {wrong} wrong; what each printed: {OUTPUTS}")
    sys.exit(bool(wrong))


def _run(environ: Mapping[str, str], *words: object) -> "subprocess.CompletedProcess[str]":
    command = [environ["COSERVE"], *map(str, words)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def _output(case: Path, environ: Mapping[str, str]) -> str:
    done = subprocess.run(
        ["bash", case / "try.sh"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
        timeout=_CASE_S,
        check=False,
    )
    (OUTPUTS / f"{case.name}.txt").write_text(done.stdout, encoding="utf-8")
    return done.stdout


def _missing(output: str, checks: Mapping[str, list[str]] | None) -> list[str]:
    """Return the texts that the output lacks but should have, or has but should lack."""
    if checks is None:
        return ["it has no entry in checks.yaml"]
    lacks = [f"lacks {each!r}" for each in checks.get("has", ()) if not re.search(each, output, re.MULTILINE)]
    return lacks + [f"has {each!r}" for each in checks.get("lacks", ()) if re.search(each, output, re.MULTILINE)]


if __name__ == "__main__":
    main()
