"""A consumer reaches the broker that it names and nothing else, counted by the kernel."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paho")

from tests.contract.test_no_outbound import WITHOUT_A_NETWORK, must_have_namespaces
from tests.daemon.delivery.results_database import ResultsDatabase

#: Runs a consumer until it logs that it waits: for a broker that is not there, and for one on another network.
RUN = """
import json, subprocess, sys
from tests.contract.without_a_network import kernel_counts
def run(name):
    before = kernel_counts()
    command = [sys.executable, "-m", "daemon.delivery", sys.argv[1], name]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    event = next(line for line in process.stderr if "consumer_waiting" in line)
    process.terminate()
    process.wait(60)
    return {"event": event} | {key: value - before[key] for key, value in kernel_counts().items()}
print(json.dumps([run("here"), run("there")]))
"""


def test_a_consumer_connects_to_its_broker_and_to_nobody_else(tmp_path: Path) -> None:
    must_have_namespaces()
    ResultsDatabase(tmp_path / "inspection.db").grow(1)
    line = {"rules": "r", "catalog": "c", "devices": {"cpu": {"expert_memory": "1GB"}}}
    hosts = {"here": "127.0.0.1", "there": "203.0.113.1"}
    consumers = {name: {"kind": "mqtt", "host": f"{host}:9"} for name, host in hosts.items()}
    (tmp_path / "coserve.yaml").write_text(json.dumps(line | {"consumers": consumers}), encoding="utf-8")
    command = [*WITHOUT_A_NETWORK, sys.executable, "-c", RUN, str(tmp_path / "coserve.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    here, there = json.loads(done.stdout)
    assert here["connections"] >= 1
    assert (here["no_route"], here["datagrams"]) == (0, 0)
    assert there["no_route"] >= 1, "the meter counts nothing: the zeros above prove nothing"
