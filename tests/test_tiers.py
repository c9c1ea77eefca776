"""The tiers of the tests (tests/tiers.py): their lists are true, and each guard of the fast tier bites."""

import os
import subprocess
import sys

import pytest

from tests import ROOT
from tests.tiers import CONTRACT, FAST, NOT_CONTRACT, NOT_FAST, is_in

CAUGHT = """
    try:
        import torch
    except BaseException:
        pass
"""
IN_A_THREAD = """
    import threading, time
    thread = threading.Thread(target=time.sleep, args=(0.05,))
    thread.start()
    thread.join()
"""
SINS = {
    "torch": ("import torch", "imports torch"),
    "torch_caught": (CAUGHT, "imports torch"),
    "popen": ("import subprocess; subprocess.run(['true'])", "starts a process (subprocess.Popen)"),
    "fork": ("import os; os.fork() or os._exit(0)", "starts a process (os.fork)"),
    "multiprocessing": (
        "import multiprocessing; multiprocessing.get_context('spawn').Process().start()",
        "starts a process (multiprocessing)",
    ),
    "sleep": ("import time; time.sleep(0.05)", "sleeps 0.05 s"),
    "sleep_in_a_thread": (IN_A_THREAD, "sleeps 0.05 s"),
}


def test_every_place_that_a_tier_names_exists_and_no_file_is_in_both() -> None:
    for place in (*FAST, *CONTRACT, *NOT_FAST, *NOT_CONTRACT):
        assert (ROOT / "tests" / place).exists(), place
    files = [path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert [file for file in files if is_in("fast", file) and is_in("contract", file)] == []
    assert any(is_in("fast", file) for file in files)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of the fast tier over a file with every sin, one that imports torch, and innocent tests."""
    folder = tmp_path_factory.mktemp("sins")
    tests = "".join(f"def test_{name}():\n    {code}\n\n" for name, (code, _) in SINS.items())
    innocent = "import time\n\ndef test_innocent():\n    time.sleep(0.001)\n    time.monotonic()\n"
    (folder / "test_sins.py").write_text(tests + innocent, encoding="utf-8")
    (folder / "test_torch_above.py").write_text("import torch\n\ndef test_never():\n    pass\n", encoding="utf-8")
    options = ["-p", "tests.tiers", "-p", "no:cacheprovider", "-c", "/dev/null", "--continue-on-collection-errors"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--tier", "fast", "-rA", *options, "--rootdir", str(folder), str(folder)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("sin", SINS)
def test_a_test_of_the_fast_tier_that_imports_torch_starts_a_process_or_sleeps_fails(output: str, sin: str) -> None:
    deed = SINS[sin][1]
    assert f"test_sins.py::test_{sin} {deed}, which no test of the fast tier does" in output
    assert f"FAILED test_sins.py::test_{sin} " in output


def test_a_file_of_the_fast_tier_that_imports_torch_fails_and_tests_without_sin_pass(output: str) -> None:
    assert "test_torch_above.py imports torch, which no test of the fast tier does" in output
    assert "ERROR test_torch_above.py" in output
    assert "PASSED test_sins.py::test_innocent" in output
    assert f"{len(SINS)} failed, 1 passed" in output
    assert "1 error" in output
