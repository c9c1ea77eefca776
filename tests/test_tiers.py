"""The guard of the fast tests (tests/tiers.py) bites."""

import os
import subprocess
import sys
from pathlib import Path

from tests import ROOT
from tests.tiers import FAST

SINS = {
    "torch": ("try:\n        import torch\n    except BaseException:\n        pass", "imports torch"),
    "popen": ("import subprocess; subprocess.run(['true'])", "starts a process (subprocess.Popen)"),
    "fork": ("import os; os.fork() or os._exit(0)", "starts a process (os.fork)"),
    "multiprocessing": (
        "import multiprocessing; multiprocessing.get_context('spawn').Process().start()",
        "starts a process (multiprocessing)",
    ),
    "sleep_in_a_thread": (
        "import threading, time; t = threading.Thread(target=time.sleep, args=(0.05,)); t.start(); t.join()",
        "sleeps 0.05 s",
    ),
}


def test_a_fast_test_that_imports_torch_starts_a_process_or_sleeps_fails(tmp_path: Path) -> None:
    assert all((ROOT / "tests" / place).is_dir() for place in FAST)
    tests = "".join(f"def test_{name}():\n    {code}\n\n" for name, (code, _) in SINS.items())
    innocent = "import time\n\ndef test_innocent():\n    time.sleep(0.001)\n    time.monotonic()\n"
    (tmp_path / "test_sins.py").write_text(tests + innocent, encoding="utf-8")
    (tmp_path / "test_torch_above.py").write_text("import torch\n\ndef test_never():\n    pass\n", encoding="utf-8")
    options = ["-p", "tests.tiers", "-p", "no:cacheprovider", "-c", "/dev/null", "--continue-on-collection-errors"]
    output = subprocess.run(
        [sys.executable, "-m", "pytest", "--fast", "-rA", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    for sin, (_, deed) in SINS.items():
        assert f"test_sins.py::test_{sin} {deed}, which no fast test does" in output
        assert f"FAILED test_sins.py::test_{sin} " in output
    assert "test_torch_above.py imports torch, which no fast test does" in output
    assert f"{len(SINS)} failed, 1 passed" in output
    assert "1 error" in output
