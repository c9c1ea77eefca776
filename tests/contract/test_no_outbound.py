"""The daemon opens no connection that its configuration does not name: a whole run without a network, counted."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.without_a_network import HTTP_PATHS, HTTP_PORT
from tests.lines import a_line

WITHOUT_A_NETWORK = [
    *["unshare", "--user", "--map-root-user", "--net", "sh", "-c"],
    'ip link set lo up && exec "$@"',
    "sh",
]


def must_have_namespaces() -> None:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs unshare and ip: install util-linux and iproute2")
    if not Path("/proc/net/snmp").exists():
        pytest.skip("needs /proc/net/snmp: this kernel counts no packets without a route")
    trial = subprocess.run([*WITHOUT_A_NETWORK, "true"], capture_output=True, text=True, check=False)
    if trial.returncode:
        pytest.skip(f"needs user and network namespaces, which are not allowed here: {trial.stderr.strip()}")


@pytest.mark.promise("Access, pages and reviews", "A whole line works without a network and never tries to reach one")
def test_a_whole_line_works_without_a_network_and_never_tries_to_reach_one(
    tmp_path: Path, torch_experts_folder: Path
) -> None:
    must_have_namespaces()
    endpoints = {
        "intake": ["ipc://run/intake.sock"],
        "results": "ipc://run/results.sock",
        "control": "ipc://run/control.sock",
        "http": f"http://127.0.0.1:{HTTP_PORT}",
    }
    a_line(tmp_path, torch_experts_folder, endpoints=endpoints)
    module = [sys.executable, "-m", "tests.contract.without_a_network", str(tmp_path)]
    done = subprocess.run([*WITHOUT_A_NETWORK, *module], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert (counts["accepted"], counts["completed"], counts["last_error"]) == (3, 3, None)
    assert counts["imports"] == {"no_route": 0, "datagrams": 0, "connections": 0}
    assert counts["line"] == {"no_route": 0, "datagrams": 0, "connections": len(HTTP_PATHS)}
    assert counts["provoked"]["no_route"] > 0, "the meter counts nothing: the zeros above prove nothing"
