"""Who may change what the line judges with, on folders that systemd's own tools made, asked as the users themselves."""

import multiprocessing
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from experts.editions.candidates import Candidates, write_candidates
from experts.editions.folder import EditionFolder
from tests import ROOT
from tests.experts.editions.test_edition_folder import an_edition, an_entry, weights

TOOLS = ("systemd-sysusers", "systemd-tmpfiles")
#: People with accounts, by number: no such users need be there.
ANNA, BEN, CLEO = 4242, 4243, 4244

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
        for number in (1, 2):
            make_edition(root, number)  # as root first: others may not be able to read the modules
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


def as_user(user: int, groups: list[int], work: Callable[[], object]) -> bool:
    """Do `work` as a user; return whether it got to its end."""

    def child() -> None:
        os.umask(0o022)
        os.setgroups(groups)
        os.setgid(groups[0])
        os.setuid(user)
        work()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(90)
    return process.exitcode == 0


def make_edition(experts: Path, number: int) -> None:
    """Take every step that a reload, a promotion and a pull take in this folder."""
    folder, catalog = EditionFolder(experts / "catalog.yaml"), experts / "catalog.yaml"
    assert folder.may_write()
    with folder.changing() as writer:
        new = experts / f"{number}.safetensors"
        sha256 = weights(new, number)
        assert folder.weights.enter({sha256: new}) == {}
        writer.add(an_edition(number, sha256))
        writer.point(an_edition(number, sha256), experts / "rules.yaml")
        candidates = Candidates().put("C0402", sha256[:12], an_entry(sha256), "a folder", None)
        write_candidates(catalog, candidates)
        writer.follow(experts / "rules.yaml")


def test_members_of_a_group_of_their_own_make_editions_and_the_service_reads_them(installed: Path) -> None:
    """Anna is such a member, as are Ben and the user of coserve-pull.service; the daemon and Cleo are not."""
    state, service = installed / "var/lib/coserve", group(installed, "coserve")
    experts, teachers, daemon = state / "experts", group(installed, "coserve-experts"), state.stat().st_uid
    for number, user in enumerate((ANNA, BEN), start=1):
        assert as_user(user, [service, teachers], lambda number=number: make_edition(experts, number))
    assert not may(ANNA, [service, teachers], f"touch {installed}/etc/coserve/rules.yaml")
    files = [path for path in experts.rglob("*") if path.is_file()]
    assert {path.relative_to(experts).parts[0] for path in files} >= {"editions", "weights", "candidates.json"}
    assert {path.stat().st_gid for path in experts.rglob("*")} == {teachers}
    for user in (daemon, CLEO):
        assert as_user(user, [service], lambda: EditionFolder(experts / "catalog.yaml").in_force())
        assert not as_user(user, [service], lambda: make_edition(experts, 3))
        changes = [f"touch {installed}/etc/coserve/rules.yaml", f"touch {experts}/new"]
        for path in experts.rglob("*"):
            changes += [f"touch {path}/new" if path.is_dir() else f"echo >> {path}", f"mv {path} {path}.old"]
        assert may(user, [service], " && ".join(f"test -r {path}" for path in experts.rglob("*")))
        assert not may(user, [service], " || ".join(changes)), changes
    assert may(daemon, [service], f"touch {state}/inspection.db")
    assert not may(ANNA, [service], f"touch {state}/inspection.db")
    assert EditionFolder(experts / "catalog.yaml").current() == 2


def test_a_person_goes_on_in_a_folder_of_their_own_where_sudo_began(installed: Path) -> None:
    own = installed / "own"
    own.mkdir()
    os.chown(own, CLEO, CLEO)
    make_edition(own, 1)
    assert as_user(CLEO, [CLEO], lambda: make_edition(own, 2))


def test_the_service_is_no_member_of_the_group_that_changes_experts(installed: Path) -> None:
    rows = (installed / "etc/group").read_text(encoding="utf-8").splitlines()
    assert [row.split(":")[3] for row in rows if row.startswith("coserve-experts:")] == [""]
    unit = (ROOT / "systemd/coserve.service").read_text(encoding="utf-8")
    assert "SupplementaryGroups=" not in unit
    assert "\nReadOnlyPaths=-/var/lib/coserve/experts\n" in unit
    pull = (ROOT / "systemd/coserve-pull.service").read_text(encoding="utf-8")
    assert "\nSupplementaryGroups=coserve-experts\n" in pull
    assert "\nReadWritePaths=/var/lib/coserve/experts\n" in pull
