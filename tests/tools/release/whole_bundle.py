"""`make test-bundle`: the bundle with every wheel, installed without a network into an empty prefix, serves images."""

import os
import shlex
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.contract.client import Line
from tests.daemon.host.manager import Manager, ended
from tests.systemd.sandbox import settings
from tools.setup.service_files import exec_words

BUILD = ROOT / "build"
#: Root can take the network away; others are told to pip by --no-index alone.
OFFLINE = ["unshare", "--net"] if os.geteuid() == 0 and shutil.which("unshare") else []
BARE = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "COLUMNS": "200"}

#: The pages' program with its templates, Parquet and MQTT, out of what was installed.
EXTRAS_WORK = """
import paho.mqtt, psycopg, pyarrow.parquet
import daemon.dashboard.app
from importlib.resources import files
assert files("daemon.dashboard").joinpath("templates", "base.html").is_file()
print("ok")
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path on a disk with room: an environment takes gigabytes, a socket's path 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="bundle-", dir=BUILD) as folder:
        yield Path(folder)


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [*OFFLINE, *command], env=BARE, cwd=cwd, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(1800)
def test_a_pc_without_a_network_installs_the_bundle_and_serves(folder: Path, torch_experts_folder: Path) -> None:
    bundles = sorted(BUILD.glob("coserve-*.tar"), key=lambda path: path.stat().st_mtime)
    assert bundles, "make it first: make bundle"
    with tarfile.open(bundles[-1]) as tar:
        tar.extractall(folder, filter="data")
    unpacked = next(folder.glob("coserve-*"))
    line = Line(folder / "line", torch_experts_folder)
    prefix = folder / "prefix"
    run("sh", unpacked / "install.sh", "--prefix", prefix, line.config, cwd=folder)
    coserve = prefix / "usr/local/bin/coserve"
    assert "install-service" in run(coserve, "--help", cwd=folder)
    assert "No mistakes found" in run(coserve, "check", line.config, cwd=folder)
    (environment,) = (prefix / "opt/coserve").iterdir()
    assert run(environment / "bin/python", "-c", EXTRAS_WORK, cwd=folder) == "ok\n"
    unit = settings((prefix / "etc/systemd/system/coserve.service").read_text())
    with Manager(folder) as manager, (folder / "log").open("wb") as log:
        environ = BARE | {"NOTIFY_SOCKET": manager.address}
        environ |= dict(word.split("=", 1) for word in shlex.split(" ".join(unit["Environment"])))
        words = exec_words(unit["ExecStart"][0])
        assert Path(words[0]).is_relative_to(prefix)
        process = subprocess.Popen([*OFFLINE, *words], env=environ, stdout=log, stderr=log, cwd=folder)
        manager.service = process
        try:
            manager.until("READY", "1", timeout_s=120.0)
            for component, verdict in (("P", "pass"), ("F", "fail")):
                assert line.result(line.send(component=component))["verdict"] == verdict
            process.send_signal(signal.SIGTERM)
            assert ended(process, folder / "log") == 0
        finally:
            process.kill()
            process.wait()
