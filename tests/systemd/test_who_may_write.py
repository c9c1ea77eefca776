"""Who may change what the line judges with, on folders that systemd's own tools made, asked as the users themselves."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

TOOLS = ("systemd-sysusers", "systemd-tmpfiles")
#: Somebody with an account, by number: no such user need be there.
ANNA = 4242

pytestmark = [
    pytest.mark.skipif(
        not all(map(shutil.which, TOOLS)), reason=f"needs {' and '.join(TOOLS)}: apt-get install systemd"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files of several users are made"),
]


@pytest.fixture
def installed() -> Iterator[Path]:
    """A root file system with the service's users and folders, which every user may walk through."""
    with tempfile.TemporaryDirectory(prefix="coserve-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        for place in ("etc", "var/lib"):
            (root / place).mkdir(parents=True)
        for tool, *words in ((TOOLS[0],), (TOOLS[1], "--create"), (TOOLS[1], "--create")):  # twice: an update
            shipped = ROOT / "systemd" / f"coserve.{tool.removeprefix('systemd-')}"
            file = shutil.copy(shipped, root / f"{shipped.suffix[1:]}.conf")
            subprocess.run([tool, f"--root={root}", *words, file], check=True, capture_output=True)
        yield root


def group(root: Path, name: str) -> int:
    rows = (line.split(":") for line in (root / "etc/group").read_text(encoding="utf-8").splitlines())
    return next(int(number) for found, _, number, *_ in rows if found == name)


def may(user: int, groups: list[int], command: str) -> bool:
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        user=user,
        group=groups[0],
        extra_groups=groups,
        umask=0o022,
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


def test_neither_the_service_nor_who_asks_it_may_change_experts_and_rules(installed: Path) -> None:
    state, service = installed / "var/lib/coserve", group(installed, "coserve")
    daemon = state.stat().st_uid
    experts = state / "experts"
    catalog = experts / "catalog.yaml"
    catalog.write_text("experts: {}\n", encoding="utf-8")
    catalog.chmod(0o664)
    os.chown(catalog, 0, group(installed, "coserve-experts"))
    for user in (daemon, ANNA):
        assert may(user, [service], f"cat {catalog}")
        for command in (f"echo >> {catalog}", f"rm {catalog}", f"touch {experts}/r50.safetensors"):
            assert not may(user, [service], command), command
        assert not may(user, [service], f"touch {installed}/etc/coserve/rules.yaml")
    assert may(daemon, [service], f"touch {state}/inspection.db")
    assert not may(ANNA, [service], f"touch {state}/inspection.db")


def test_members_of_a_group_of_their_own_change_experts_and_the_service_reads_them(installed: Path) -> None:
    state, service = installed / "var/lib/coserve", group(installed, "coserve")
    experts, teachers = state / "experts", group(installed, "coserve-experts")
    assert may(ANNA, [service, teachers], f"echo 1 > {experts}/.new && mv {experts}/.new {experts}/r50.safetensors")
    assert (experts / "r50.safetensors").stat().st_gid == teachers
    assert may(state.stat().st_uid, [service], f"cat {experts}/r50.safetensors")
    assert not may(ANNA, [service, teachers], f"touch {installed}/etc/coserve/rules.yaml")


def test_the_service_is_no_member_of_the_group_that_changes_experts(installed: Path) -> None:
    rows = (installed / "etc/group").read_text(encoding="utf-8").splitlines()
    assert [row.split(":")[3] for row in rows if row.startswith("coserve-experts:")] == [""]
    unit = (ROOT / "systemd/coserve.service").read_text(encoding="utf-8")
    assert "SupplementaryGroups=" not in unit
    assert "\nReadOnlyPaths=-/var/lib/coserve/experts\n" in unit
