import platform
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests import ROOT
from tests.contract.client import RULES
from tests.daemon.dashboard.browser import ShownLine
from tests.daemon.host.manager import Manager, ended
from tests.systemd.sandbox import UNISTD, enter_and_run, settings
from tests.tools.run_commands import coserve
from tests.waiting import PATIENCE_S
from tools.setup.service_files import exec_words

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze: apt-get install systemd"
)
needs_x86_64 = pytest.mark.skipif(
    platform.machine() != "x86_64" or not UNISTD.exists(), reason="needs x86_64 and linux-libc-dev (apt-get install)"
)
MOST_EXPOSED = 2.0


@pytest.fixture(params=["plain", "nvidia and network", "coserve-plant", "coserve-pull"])
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The installed unit, as it is and with every drop-in that ships, and those beside it."""
    if request.param.startswith("coserve-"):
        unit = tmp_path / f"{request.param}.service"
        unit.write_text((ROOT / "systemd" / unit.name).read_text().replace("/usr/local/bin/coserve", sys.executable))
        return unit
    coserve("install-service", "--prefix", tmp_path)
    installed = tmp_path / "etc/systemd/system/coserve.service"
    if request.param != "plain":
        shutil.copytree(ROOT / "systemd/coserve.service.d", installed.with_name("coserve.service.d"))
    return installed


@pytest.mark.promise("A service of systemd", 'systemd finds no mistake in the unit, and its exposure is "OK" or better')
@needs_systemd
def test_systemd_finds_no_mistake_in_a_unit_which_is_hardly_exposed(unit: Path) -> None:
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    words = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = re.search(r"Overall exposure level for .*: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) <= MOST_EXPOSED


def test_a_start_that_failed_is_tried_again_for_half_an_hour_and_not_for_ever() -> None:
    """An address, a mount or a lock may come late; a mistake in the configuration does not spin for ever."""
    unit = settings((ROOT / "systemd/coserve.service").read_text())
    assert unit["Restart"] == ["always"]
    assert "RestartPreventExitStatus" not in unit
    assert unit["StartLimitIntervalSec"] == ["1h"]
    assert unit["TimeoutStartSec"] == ["90s"]
    most, pause_s = int(unit["StartLimitBurst"][0]), float(unit["RestartSec"][0].removesuffix("s"))
    assert 10 * 60 <= most * pause_s < 3600  # a start itself takes some seconds more


def test_a_line_that_other_machines_reach_starts_after_its_addresses() -> None:
    drop_in = settings((ROOT / "systemd/coserve.service.d/network.conf").read_text())
    assert drop_in["Wants"] == drop_in["After"] == ["network-online.target"]


@pytest.mark.promise("A service of systemd", "The unit's command serves images under the unit's system call filter")
@pytest.mark.test_all
@needs_systemd
@needs_x86_64
def test_the_installed_command_line_serves_images_under_the_units_system_call_filter(
    tmp_path: Path, torch_experts_folder: Path
) -> None:
    line = ShownLine(tmp_path / "line", torch_experts_folder, RULES, stop={"backlog_for": "20s"})
    coserve("install-service", line.config, "--prefix", tmp_path)
    coserve(
        "reload", "--config", line.config
    )  # the service may not make the first edition; as root it would give it to the owner
    unit = settings((tmp_path / "etc/systemd/system/coserve.service").read_text())
    assert unit["TimeoutStopSec"] == ["33s"]
    for name in ("RUNTIME", "STATE", "LOGS"):
        (tmp_path / name).mkdir()
    with Manager(tmp_path) as manager:
        environ = manager.environ(watchdog_s=float(unit["WatchdogSec"][0].removesuffix("s")))
        environ |= {f"{name}_DIRECTORY": str(tmp_path / name) for name in ("RUNTIME", "STATE", "LOGS")}
        environ |= dict(word.split("=", 1) for word in shlex.split(" ".join(unit["Environment"])))
        command = enter_and_run(
            unit["SystemCallFilter"], unit["RestrictAddressFamilies"][0].split(), exec_words(unit["ExecStart"][0])
        )
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                command, env=environ, stdout=log, stderr=log, cwd=ROOT, umask=int(unit["UMask"][0], 8)
            )
        manager.service = process
        try:
            manager.until("READY", "1")
            names = ("control.sock", "intake.sock")
            modes = {name: stat.S_IMODE((line.folder / "run" / name).stat().st_mode) for name in names}
            assert modes == dict.fromkeys(names, 0o660)
            for component, verdict in (("P", "pass"), ("F", "fail")):  # F goes on to the detector
                assert line.result(line.send(component=component))["verdict"] == verdict
            line.wait_until_it_shows()  # the web process is under the filter too
            with urllib.request.urlopen(line.url("/boards"), timeout=PATIENCE_S) as page:  # noqa: S310 - our own http
                assert "S1" in page.read().decode()
            assert line.status()["children"][0]["restarts"] == 0
            assert "child_priority_not_set" not in (tmp_path / "log").read_text(encoding="utf-8")
            process.send_signal(signal.SIGHUP)
            manager.until("RELOADING", "1")
            manager.until("READY", "1")
            process.send_signal(signal.SIGTERM)
            manager.until("STOPPING", "1")
            assert ended(process, tmp_path / "log") == 0
        finally:
            process.kill()
            process.wait()


CONVOLVE = """\
import sys, torch
from tests.daemon.dashboard.browser import ShownLine
from tests.systemd.sandbox import refuse_written_code
network = torch.nn.Conv2d(3, 64, 7, stride=2, padding=3)
try:
    refuse_written_code()
except OSError as error:
    print("no such means:", error)
    sys.exit()
try:
    with torch.inference_mode():
        network(torch.zeros(4, 3, 224, 224))
except RuntimeError as error:
    print("refused:", error)
else:
    print("computed")
"""


@pytest.mark.test_all
def test_networks_write_code_at_run_time_so_that_the_unit_must_not_deny_it() -> None:
    done = subprocess.run([sys.executable, "-c", CONVOLVE], cwd=ROOT, capture_output=True, text=True, check=True)
    if "no such means" in done.stdout:
        pytest.skip("needs Linux 6.3 or newer: PR_SET_MDWE")
    assert "refused: could not create a primitive" in done.stdout, "set MemoryDenyWriteExecute=yes in the unit"
    assert "MemoryDenyWriteExecute" not in settings((ROOT / "systemd/coserve.service").read_text())


@needs_systemd
@needs_x86_64
def test_the_filter_of_these_tests_kills_what_the_unit_forbids() -> None:
    unit = settings((ROOT / "systemd/coserve.service").read_text())
    for code in ("import os; os.chroot('/')", "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"):
        command = enter_and_run(unit["SystemCallFilter"], ["AF_UNIX"], [sys.executable, "-c", code])
        assert subprocess.run(command, check=False).returncode == -signal.SIGSYS
