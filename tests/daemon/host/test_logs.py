import array
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SAYS = """\
import sys, structlog
from pathlib import Path
from daemon.host.logs import configure_logs
configure_logs(sys.stderr, Path(sys.argv[1]))
log = structlog.get_logger("test")
"""


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket at which journald takes native entries."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "journal"))
        listening.settimeout(10.0)
        yield listening


def entry(journal: socket.socket) -> dict[str, str]:
    """Return the next entry, read as journald reads it: a large one comes as a sealed file."""
    data, ancillary, _, _ = journal.recvmsg(1 << 20, socket.CMSG_LEN(4))
    if ancillary:
        fds = array.array("i", ancillary[0][2])
        with open(fds[0], "rb", closefd=True) as file:  # noqa: PTH123 - a descriptor, not a path
            file.seek(0)
            data = file.read()
    fields: dict[str, str] = {}
    while data:
        line, _, data = data.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            (size,) = struct.unpack("<Q", data[:8])
            value, data = data[8 : 8 + size], data[9 + size :]
        fields[name.decode()] = value.decode()
    return fields


def say(tmp_path: Path, program: str, socket_name: str = "journal") -> str:
    """Run `program` with a stderr that claims to be the journal's stream; return the output of that stream."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        status = os.fstat(theirs.fileno())
        environ = os.environ | {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        code = [sys.executable, "-c", SAYS + program, str(tmp_path / socket_name)]
        subprocess.run(code, stderr=theirs, env=environ, timeout=120, check=True)
        theirs.close()
        return ours.makefile().read()


def test_an_event_in_the_journal_has_a_field_for_each_key(tmp_path: Path, journal: socket.socket) -> None:
    output = say(tmp_path, "log.error('expert_unusable', expert='R0402', load_ms=2.5, pinned=True, tier=None)")
    assert output == ""
    assert entry(journal) == {
        "MESSAGE": "expert_unusable expert=R0402 load_ms=2.5 pinned=true tier=",
        "PRIORITY": "3",
        "SYSLOG_IDENTIFIER": "coserve",
        "EVENT": "expert_unusable",
        "EXPERT": "R0402",
        "LOAD_MS": "2.5",
        "PINNED": "true",
    }


def test_an_exception_comes_as_one_entry_however_long(tmp_path: Path, journal: socket.socket) -> None:
    say(tmp_path, "try: raise ValueError('x' * 3_000_000)\nexcept ValueError: log.exception('defect')")
    fields = entry(journal)
    assert fields["PRIORITY"] == "3"
    assert fields["EXCEPTION"].startswith("Traceback")
    assert len(fields["EXCEPTION"]) > 3_000_000
    assert fields["MESSAGE"].startswith("defect\nTraceback")


def test_without_a_journal_socket_entries_go_to_stderr_with_their_priority(tmp_path: Path) -> None:
    assert say(tmp_path, "log.warning('disk_slow', for_s=3)", "nothing") == "<4>disk_slow for_s=3\n"


def test_elsewhere_events_are_logfmt(tmp_path: Path) -> None:
    code = [sys.executable, "-c", SAYS + "log.info('expert_loaded', expert='R0402')", str(tmp_path)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.endswith("level=info event=expert_loaded expert=R0402\n")
    assert done.stderr.startswith("timestamp=")
