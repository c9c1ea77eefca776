"""The fault shim alone: plans and the calls of a small process under them."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.shim import Call, ShimError, read_log, shim_environment, switch_faults

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install gcc")

OPEN = "import errno, os; fd = os.open('data', os.O_CREAT | os.O_RDWR)\n"


def run(folder: Path, plan: list[str], code: str, **more: Path) -> tuple[int, str, list[Call]]:
    """Return the exit status, the output, and the logged calls on the file `data` of a process under `plan`."""
    log = folder / "calls"
    environ = shim_environment(plan, log, **more)
    done = subprocess.run(
        [sys.executable, "-c", OPEN + code], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    calls = [call for call in read_log(log) if call.path == str(folder / "data")]
    return done.returncode, done.stdout.strip() + done.stderr.strip(), calls


def test_a_call_that_no_rule_names_passes_and_is_logged(tmp_path: Path) -> None:
    status, output, calls = run(tmp_path, [], "os.pwrite(fd, b'abc', 2); os.fdatasync(fd); print(os.pread(fd, 9, 0))")
    assert (status, output) == (0, r"b'\x00\x00abc'")
    assert [(call.call, call.function, call.offset, call.length, call.other) for call in calls[1:]] == [
        ("write", "pwrite", 2, 3, ""),
        ("sync", "fdatasync", -1, 5, ""),
    ]
    assert calls[0].other == "created"


@pytest.mark.parametrize(
    ("rule", "written"), [("write:kill-before", b""), ("write:kill-after", b"abcd"), ("write:kill-short", b"ab")]
)
def test_a_kill_leaves_what_was_written_before_it(tmp_path: Path, rule: str, written: bytes) -> None:
    status, _, calls = run(tmp_path, [f"{rule}:1"], "os.write(fd, b'abcd'); os.write(fd, b'efgh')")
    assert status == -signal.SIGKILL
    assert (tmp_path / "data").read_bytes() == written
    assert calls[-1].action == rule.split(":")[1]


def test_the_nth_matching_call_fails_and_only_on_files_that_the_rule_names(tmp_path: Path) -> None:
    code = (
        "other = os.open('other', os.O_CREAT | os.O_RDWR)\n"
        "for target in (other, fd, fd, fd):\n"
        "    try: os.fsync(target); print('ok', end=' ')\n"
        "    except OSError as error: print(errno.errorcode[error.errno], end=' ')"
    )
    _, output, calls = run(tmp_path, ["sync@/data$:eio:2"], code)
    assert output == "ok ok EIO ok"
    assert [call.error for call in calls if call.call == "sync"] == [0, 5, 0]


def test_from_the_nth_on_every_call_fails(tmp_path: Path) -> None:
    code = (
        "for _ in range(3):\n"
        "    try: os.write(fd, b'x'); print('ok', end=' ')\n"
        "    except OSError as error: print(errno.errorcode[error.errno], end=' ')"
    )
    assert run(tmp_path, ["write@/data:enospc:2+"], code)[1] == "ok ENOSPC ENOSPC"


def test_a_short_write_writes_half_and_says_so(tmp_path: Path) -> None:
    assert run(tmp_path, ["write@/data:short"], "print(os.writev(fd, [b'abc', b'defgh']))")[1] == "4"
    assert (tmp_path / "data").read_bytes() == b"abcd"


def test_faults_are_switched_on_and_off_in_a_running_process(tmp_path: Path) -> None:
    switch = tmp_path / "switch"
    switch_faults(switch, ["write@/data:eio"])
    code = (
        "def attempt():\n"
        "    try: return os.write(fd, b'x')\n"
        "    except OSError as error: return errno.errorcode[error.errno]\n"
        f"first = attempt(); os.rename({str(switch)!r}, {str(tmp_path / 'off')!r}); second = attempt()\n"
        f"os.rename({str(tmp_path / 'off')!r}, {str(switch)!r}); print(first, second, attempt())"
    )
    assert run(tmp_path, [], code, switch=switch)[1] == "EIO 1 EIO"


def test_sends_are_named_by_the_end_that_sends(tmp_path: Path) -> None:
    code = (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0)); port = server.getsockname()[1]\n"
        "client = socket.create_connection(('127.0.0.1', port)); accepted = server.accept()[0]\n"
        "client.send(b'hello'); print(port, flush=True); accepted.send(b'hello'); print('not reached')"
    )
    status, output, _ = run(tmp_path, ["send@socket/tcp/:kill-after:2"], code)
    sends = [call.path for call in read_log(tmp_path / "calls") if call.call == "send"]
    assert (status, len(sends), sends[-1]) == (-signal.SIGKILL, 2, f"socket/tcp/{output}")


def test_renames_and_unlinks_are_counted_too(tmp_path: Path) -> None:
    code = (
        "os.rename('data', 'new')\ntry: os.unlink('new')\nexcept OSError as error: print(errno.errorcode[error.errno])"
    )
    _, output, calls = run(tmp_path, ["unlink@/new:eio"], code)
    assert output == "EIO"
    assert (calls[-1].call, calls[-1].other) == ("rename", str(tmp_path / "new"))


def test_what_is_no_rule_is_refused_with_an_example() -> None:
    with pytest.raises(ShimError, match=r"'fsync:eio' is no rule: expected CALL.*sync@\.journal:eio:3"):
        shim_environment(["fsync:eio"])
