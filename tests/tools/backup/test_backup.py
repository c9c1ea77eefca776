"""A whole line into one archive while it runs, and out of it again: nothing accepted is missing, nothing is damaged."""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from coserve_client import Publisher
from daemon.config.settings import load_config
from daemon.records import BoardRef, Image, JournalKey, Verdict
from daemon.storage.database.store import Store
from daemon.storage.journal import Journal
from experts.editions.folder import EditionFolder
from experts.weights import file_sha256
from routing_rules.compile import compile_rules
from tests import ROOT
from tests.contract.client import Line
from tests.editions import a_serving, files_in_force
from tests.lines import a_jpeg
from tests.simulated import a_service
from tests.small_disk import small_disk
from tests.sql import sql
from tests.tools.run_commands import coserve, paused_coserve, start_coserve
from tests.waiting import PATIENCE_S
from tools.backup.archive import HEAD, SUMS, write_backup
from tools.backup.gentle import GentleReader, absent_pages
from tools.backup.restore import unpack
from tools.terminal.console import CommandError

EXPERTS = ROOT / "tests/tools/backup/line"
RULES = (
    'boards:\n  free: {extras: allow, components: {R0402: 1000}}\nclassifiers:\n  "*": {expert: R0402, pass: [ok]}\n'
)
CONFIG = "rules: rules.yaml\ncatalog: experts/catalog.yaml\ndevices: {cpu: {expert_memory: 250MB}} # a remark\n"


def a_folder(folder: Path, config: str = CONFIG) -> Path:
    """A line with edition 1 in force; nothing runs there."""
    (folder / "experts").mkdir(parents=True)
    shutil.copy(EXPERTS / "catalog.yaml", folder / "experts")
    shutil.copy(EXPERTS / "R0402.safetensors", folder / "experts")
    (folder / "rules.yaml").write_text(RULES, encoding="utf-8")
    (folder / "coserve.yaml").write_text(config, encoding="utf-8")
    files_in_force(folder / "coserve.yaml")
    return folder / "coserve.yaml"


class Writing:
    """A store and a journal of small segments, as a busy daemon's writer uses them."""

    def __init__(self, folder: Path) -> None:
        self.serving = a_serving(compile_rules(RULES, "rules.yaml", None))
        self.journal = Journal(folder / "journal", segment_bytes=4096)
        self.store: Store = Store(f"sqlite:///{folder}/inspection.db")
        self.count = 0

    def accept(self, images: int = 1) -> list[Image]:
        names = [f"i{self.count + n}" for n in range(1, images + 1)]
        self.count += images
        board = BoardRef("free", "S1")
        sent = [Image("cam", name, board, "R0402", name, sha256="0" * 64) for name in names]
        keys = self.journal.append([f"image {name} ".encode() * 40 for name in names])
        accepted = self.store.accept(list(zip(sent, keys, strict=True)), self.serving)
        return [image for image in accepted if isinstance(image, Image)]

    def judge(self, images: list[Image]) -> None:
        self.store.write_results([Verdict(image, "pass") for image in images])
        self.journal.drop_segments(self.store.segments_in_use)

    def close(self) -> None:
        self.store.close()
        self.journal.close()


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Writing]:
    a_folder(tmp_path / "line")
    writer = Writing(tmp_path / "line")
    yield writer
    writer.close()


def backed_up(folder: Path, **options: Any) -> Path:
    archive = folder.with_name("line.tar")
    write_backup(folder / "coserve.yaml", archive, **options)
    return archive


def names(archive: Path) -> list[str]:
    with tarfile.open(archive) as tar:
        return tar.getnames()


@pytest.mark.promise(
    "Upgrades, ways back, backups",
    "A backup of a running line has every image accepted before it began; restored elsewhere, each is finished once",
)
def test_a_line_restored_from_a_backup_taken_while_cameras_sent_judges_every_image_once(
    tmp_path: Path, experts_folder: Path
):
    line = Line(tmp_path / "line", experts_folder, memory="100MB")
    accepted: set[str] = set()
    done = threading.Event()

    def answered(image_id: str, answer: dict[str, Any]) -> None:
        if answer["type"] == "accepted":
            accepted.add(image_id)

    def publish() -> None:
        with Publisher(line.intake, "cam-1", silence_s=120.0, patience_s=240.0, on_answer=answered) as publisher:
            number = 0
            while not done.wait(0.0 if number < 60 else 0.1):  # a burst, then a calm line
                board = {"type": "free", "serial": f"S{number % 5}"}
                publisher.send(f"i{number}", a_jpeg(number % 50), board=board, component="PVF"[number % 3])
                publisher.pump(0.0)
                number += 1

    thread = threading.Thread(target=publish)
    with line.service() as service:
        thread.start()
        try:
            line.wait(lambda: len(accepted) > 40)
            assert service.process is not None
            stop_while_images_wait(line, service.process)  # or a fast daemon is done before a slow backup begins
            before = set(accepted)
            report = backed_up_beside(line, service.process, tmp_path / "line.tar")
        finally:
            done.set()
            thread.join()
        service.kill()
    assert report["waiting"] > 0
    run = start_coserve("restore", tmp_path / "line.tar", tmp_path / "new")
    assert run.returncode == 0, run.stderr
    shutil.rmtree(line.folder)
    restored = Line.__new__(Line)
    restored.folder, restored.config = tmp_path / "new", tmp_path / "new" / "coserve.yaml"
    database = restored.folder / "inspection.db"
    position = sql(database, "SELECT last_seq FROM stream_position")[0][0]
    stored = {name for (name,) in sql(database, "SELECT image_id FROM inspections")}
    assert before <= stored
    with a_service(restored.config, restored.folder / "daemon.log"):
        restored.idle()
        stream = restored.stream()
    assert [message["seq"] for message in stream] == list(range(1, len(stream) + 1))
    assert len(stream) > position
    inspected = [message["id"] for message in stream if message["topic"].startswith("inspection/")]
    assert sorted(inspected) == sorted(stored)
    lost = "SELECT count(*) FROM inspections WHERE status <> 'done' OR reason IS NOT NULL"
    assert sql(database, lost) == [(0,)]
    for (path,) in sql(database, "SELECT image_path FROM inspections WHERE image_path IS NOT NULL"):
        assert (restored.folder / path).is_file()


def stop_while_images_wait(line: Line, daemon: "subprocess.Popen[str]") -> None:
    while True:
        daemon.send_signal(signal.SIGSTOP)
        os.waitpid(daemon.pid, os.WUNTRACED)
        if line.rows("SELECT count(*) FROM pending") > [(0,)]:
            return
        daemon.send_signal(signal.SIGCONT)
        time.sleep(0.05)


def backed_up_beside(line: Line, daemon: "subprocess.Popen[str]", archive: Path) -> dict[str, Any]:
    """Return the report of a backup; the stopped daemon goes on beside it from the moment of its snapshot."""
    words = ["-m", "tools", "backup", str(line.config), str(archive), "--images", "--json"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as run:
        try:
            snapshot = archive.with_name(f".{archive.name}.db")
            line.wait(lambda: snapshot.exists() or run.poll() is not None)
        finally:
            daemon.send_signal(signal.SIGCONT)
        report, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0
    return json.loads(report)


def test_every_backup_of_a_busy_writer_holds_all_accepted_images_and_their_bytes(tmp_path: Path, writing: Writing):
    """Segments come and go all the time: what the copied rows point at is always in the archive."""
    until = threading.Event()
    waiting = writing.accept(7)

    def work() -> None:
        while not until.is_set():
            waiting.extend(writing.accept(5))
            writing.judge(waiting[:5])
            del waiting[:5]

    for round_ in range(4):
        until.clear()
        thread = threading.Thread(target=work)
        thread.start()
        try:
            time.sleep(0.05)
            before = writing.count - 5
            archive = backed_up(tmp_path / "line")
        finally:
            until.set()
            thread.join()
        restored = tmp_path / f"restored-{round_}"
        unpack(archive, restored)
        database = restored / "inspection.db"
        assert sql(database, "PRAGMA integrity_check") == [("ok",)]
        assert sql(database, "SELECT count(*) FROM inspections")[0][0] >= before
        journal = Journal(restored / "journal")
        waiting_rows = sql(
            database, 'SELECT segment, "offset", length, image_id FROM pending JOIN inspections USING (inspection_id)'
        )
        assert waiting_rows
        for segment, offset, length, name in waiting_rows:
            payload = journal.read(JournalKey(segment, offset, length))
            assert payload.startswith(f"image {name} ".encode())
        journal.close()


def test_a_line_whose_files_lie_together_is_restored_as_it_is(tmp_path: Path, writing: Writing):
    writing.accept(3)
    archive = backed_up(tmp_path / "line")
    restored = unpack(archive, tmp_path / "restored")
    assert (restored.last_seq, restored.waiting) == (0, 3)
    line, new = tmp_path / "line", tmp_path / "restored"
    catalog = (new / "experts/catalog.yaml").read_text(encoding="utf-8")
    assert catalog.startswith("# Written from edition 2; comments are not kept.")
    files = {path.relative_to(new) for path in new.rglob("*") if path.is_file()}
    assert files >= {path.relative_to(line) for path in (line / "experts").glob("weights/*/*")}
    for name in ("coserve.yaml", "rules.yaml", "experts/editions/000001.json"):
        assert (new / name).read_bytes() == (line / name).read_bytes()
    assert not list(tmp_path.glob(".*"))
    assert archive.stat().st_mode & 0o777 == 0o640
    subprocess.run(["sha256sum", "--quiet", "-c", SUMS], cwd=_untarred(archive, tmp_path), check=True)


def _untarred(archive: Path, folder: Path) -> Path:
    (folder / "untarred").mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", folder / "untarred"], check=True)
    return folder / "untarred"


def test_files_that_lie_apart_come_together_and_the_configuration_says_so(tmp_path: Path):
    elsewhere = tmp_path / "var"
    config = a_folder(tmp_path / "etc")
    shutil.move(tmp_path / "etc" / "experts", tmp_path / "experts")
    config.write_text(
        f"database: sqlite:///{elsewhere}/results.db\njournal: {elsewhere}/journal\nimages: {elsewhere}/pictures\n"
        f"rules: {tmp_path}/etc/../etc/rules.yaml\ncatalog: {tmp_path}/experts/catalog.yaml\n"
        "devices: {cpu: {expert_memory: 250MB, profile: ../cpu.yaml}}\n",
        encoding="utf-8",
    )
    catalog = tmp_path / "experts" / "catalog.yaml"
    weights = shutil.move(tmp_path / "experts" / "R0402.safetensors", tmp_path / "weights.safetensors")
    catalog.write_text(catalog.read_text().replace("R0402.safetensors", str(weights)), encoding="utf-8")
    shutil.copy(EXPERTS / "profile.yaml", tmp_path / "cpu.yaml")
    Store(f"sqlite:///{elsewhere}/results.db").close()
    restored = unpack(backed_up(config.parent), tmp_path / "restored").config
    settings = load_config(restored, {})
    inside = [settings.rules, settings.catalog, settings.journal, settings.images, settings.devices["cpu"].profile]
    assert all(path is not None and path.is_relative_to(tmp_path / "restored") for path in inside)
    assert settings.images.name == "pictures"
    assert settings.rules.read_text(encoding="utf-8") == RULES
    assert sql(Path(settings.database.removeprefix("sqlite:///")), "SELECT count(*) FROM inspections") == [(0,)]
    entries = yaml.safe_load(settings.catalog.read_text(encoding="utf-8"))["experts"]
    assert {file_sha256(settings.catalog.parent / entry["file"]) for entry in entries.values()} == {
        entries["R0402"]["sha256"]
    }
    assert (tmp_path / "restored" / "coserve.yaml.before-backup").read_bytes() == config.read_bytes()


def test_a_backup_has_every_edition_and_the_weights_that_are_needed_again(tmp_path: Path, writing: Writing):
    """Of editions 1 to 5, each with weights of its own: 1 has an open board, 3 and 4 stood before 5."""
    experts = tmp_path / "line" / "experts"
    store = EditionFolder(experts / "catalog.yaml").weights
    writing.accept()
    by_edition = [*store.all()]
    for number in range(2, 6):
        with_other_weights(experts, number)
        files_in_force(tmp_path / "line" / "coserve.yaml")
        by_edition += store.all().keys() - {*by_edition}
    (experts / "releases" / "manifests" / "line").mkdir(parents=True)
    (experts / "releases" / "manifests" / "line" / "1.json").write_text("{}")
    (experts / "editions" / "000009.json").write_text("of a promotion that was killed")
    archive = backed_up(tmp_path / "line")
    backed = {name for name in names(archive) if name.startswith("experts/")}
    kept = {by_edition[at] for at in (0, 2, 3, 4)}
    assert {Path(name).stem for name in backed if "/weights/" in name} == kept
    assert {name for name in backed if "/editions/" in name} == {
        "experts/editions/current",
        *(f"experts/editions/00000{number}.json" for number in range(1, 6)),
    }
    assert "experts/releases/manifests/line/1.json" in backed
    restored = EditionFolder(unpack(archive, tmp_path / "restored").config.parent / "experts" / "catalog.yaml")
    edition = restored.in_force()
    assert edition is not None
    assert (edition.number, edition.parent, edition.why, edition.note) == (10, 5, "restore", "line.tar")
    assert {*restored.weights.all()} == kept
    store.remove(by_edition[4])
    report = write_backup(tmp_path / "line" / "coserve.yaml", archive)
    assert f"{by_edition[4]}.safetensors: this weights file does not exist" in str(report["warnings"])
    shutil.rmtree(experts / "editions")
    with pytest.raises(CommandError, match="no edition is in force on this line yet: coserve reload"):
        write_backup(tmp_path / "line" / "coserve.yaml", archive)


def with_other_weights(experts: Path, number: int) -> None:
    weights, catalog = experts / "R0402.safetensors", experts / "catalog.yaml"
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([number]))
    document = yaml.safe_load(catalog.read_text(encoding="utf-8"))
    for entry in document["experts"].values():
        entry["sha256"] = file_sha256(weights)
    catalog.write_text(yaml.safe_dump(document), encoding="utf-8")


def test_what_the_environment_says_is_in_the_restored_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    a_folder(tmp_path / "line")
    monkeypatch.setenv("COSERVE_LIMITS_CREDIT", "9")
    monkeypatch.setenv("COSERVE_DATABASE", f"sqlite:///{tmp_path}/other.db")
    Store(f"sqlite:///{tmp_path}/other.db").close()
    restored = unpack(backed_up(tmp_path / "line"), tmp_path / "restored").config
    settings = load_config(restored, {})
    assert settings.limits.credit == 9
    assert settings.database.startswith(f"sqlite:///{tmp_path}/restored/")
    assert Path(settings.database.removeprefix("sqlite:///")).exists()


@pytest.mark.promise("Upgrades, ways back, backups", "Secret keys are left out of backups unless requested")
def test_secrets_stay_where_they_are_unless_they_are_asked_for(tmp_path: Path):
    keys = "security: {server_key: keys/server.key_secret, allowed_clients: keys/clients}\n"
    config = a_folder(tmp_path / "line", CONFIG + keys)
    clients = tmp_path / "line" / "keys" / "clients"
    clients.mkdir(parents=True)
    (clients / "camera.key").write_text("public", encoding="utf-8")
    (clients / "camera.key_secret").write_text("secret", encoding="utf-8")
    (tmp_path / "line" / "keys" / "server.key_secret").write_text("secret", encoding="utf-8")
    archive = tmp_path / "line.tar"
    report = write_backup(config, archive)
    assert not [name for name in names(archive) if "secret" in name]
    assert "keys/clients/camera.key" in names(archive)
    assert "keys/server.key_secret is left out" in str(report["warnings"])
    assert write_backup(config, archive, with_secrets=True)["warnings"][1:] == []
    assert [name for name in names(archive) if "secret" in name] == ["keys/server.key_secret"]
    assert archive.stat().st_mode & 0o777 == 0o600
    unpack(archive, tmp_path / "restored")
    assert (tmp_path / "restored" / "keys" / "server.key_secret").stat().st_mode & 0o777 == 0o600


def test_a_secret_that_systemd_gives_stays_named_and_is_said(tmp_path: Path):
    security = "security: {http_token: $CREDENTIALS_DIRECTORY/token}\n"
    report = write_backup(a_folder(tmp_path / "line", CONFIG + security), tmp_path / "line.tar", with_secrets=True)
    assert "security.http_token comes from systemd" in str(report["warnings"])
    restored = unpack(tmp_path / "line.tar", tmp_path / "restored").config
    assert restored.read_text(encoding="utf-8").endswith(security)


def test_kept_images_come_along_when_asked_for(tmp_path: Path, writing: Writing):
    (image,) = writing.accept()
    path = f"images/2026-01-01/{image.inspection_id}.jpg"
    (tmp_path / "line" / "images" / "2026-01-01").mkdir(parents=True)
    (tmp_path / "line" / path).write_bytes(b"picture")
    sql(tmp_path / "line", "UPDATE inspections SET image_path = ?", values=(path,))
    assert path not in names(backed_up(tmp_path / "line"))
    said = coserve("backup", tmp_path / "line" / "coserve.yaml", tmp_path / "line.tar").stdout
    assert "1 image that waits; without the 1 kept image (--images adds them)" in said
    said = coserve("restore", tmp_path / "line.tar", tmp_path / "restored").stdout
    assert "without the 1 kept image, which" in said
    assert path in names(backed_up(tmp_path / "line", with_images=True))
    assert "kept image" not in coserve("restore", tmp_path / "line.tar", tmp_path / "with_images").stdout
    (tmp_path / "line" / path).unlink()
    assert path not in names(backed_up(tmp_path / "line", with_images=True))


def members(archive: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(archive) as tar:
        return tar.getmembers()


def test_a_flipped_bit_in_any_member_is_refused_by_name(tmp_path: Path, writing: Writing):
    writing.accept(3)
    archive = backed_up(tmp_path / "line")
    good = archive.read_bytes()
    for member in members(archive):
        bad = bytearray(good)
        bad[member.offset_data + member.size // 2] ^= 1
        archive.write_bytes(bad)
        with pytest.raises(CommandError) as caught:
            unpack(archive, tmp_path / "restored")
        if member.name not in (HEAD, SUMS):
            assert member.name in str(caught.value)
        assert not (tmp_path / "restored").exists()
    archive.write_bytes(good)
    unpack(archive, tmp_path / "restored")


@pytest.mark.promise(
    "Upgrades, ways back, backups",
    "An archive that is cut off anywhere, has a flipped bit, or leads out of its folder is refused, and the "
    "message names the member",
)
def test_an_archive_that_was_cut_off_anywhere_is_refused(tmp_path: Path, writing: Writing):
    writing.accept(3)
    archive = backed_up(tmp_path / "line")
    good = archive.read_bytes()
    last = members(archive)[-1]
    ends = {0, 1, 511, 512, 1000, last.offset, last.offset_data, last.offset_data + last.size - 1}
    ends |= {member.offset for member in members(archive)} | {member.offset_data + 1 for member in members(archive)}
    for end in sorted(ends):
        archive.write_bytes(good[:end])
        with pytest.raises(CommandError, match=r"line\.tar"):
            unpack(archive, tmp_path / "restored")
        assert not (tmp_path / "restored").exists()
    assert not list(tmp_path.glob(".*"))


def altered(archive: Path, target: Path, *more: tarfile.TarInfo, data: bytes = b"") -> Path:
    """The archive with more members before its sums, each with `data`."""
    with tarfile.open(archive) as old, tarfile.open(target, "w") as new:
        for member in old.getmembers():
            for extra in more if member.name == SUMS else ():
                extra.size = len(data)
                new.addfile(extra, io.BytesIO(data))
            new.addfile(member, old.extractfile(member))
    return target


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, tarfile.REGTYPE) for name in ("../escaped", "/tmp/escaped", "a/../../escaped", "rules.yaml")),  # noqa: S108
        *(("link", kind) for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)),
    ],
)
def test_a_member_that_leads_out_of_the_folder_or_comes_twice_is_refused(tmp_path: Path, name: str, kind: bytes):
    a_folder(tmp_path / "line")
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    data = b"x" if kind == tarfile.REGTYPE else b""
    bad = altered(backed_up(tmp_path / "line"), tmp_path / "bad.tar", member, data=data)
    with pytest.raises(CommandError, match=r"escaped|rules\.yaml|link"):
        unpack(bad, tmp_path / "restored")
    assert not (tmp_path / "escaped").exists()
    assert not (tmp_path / "restored").exists()


def test_an_archive_of_empty_files_is_refused_before_they_are_written(tmp_path: Path):
    a_folder(tmp_path / "line")
    empty = [tarfile.TarInfo(f"images/{number}") for number in range(101)]
    bad = altered(backed_up(tmp_path / "line"), tmp_path / "bad.tar", *empty)
    with pytest.raises(CommandError, match="over 100 empty files"):
        unpack(bad, tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


def with_head(archive: Path, target: Path, head: bytes, pax: dict[str, str] | None = None, said_of: str = SUMS) -> Path:
    """The archive with another first member and right sums; `pax` says more of the member `said_of`."""
    was = b""
    with tarfile.open(archive) as old, tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as new:
        for member in old.getmembers():
            source = old.extractfile(member)
            assert source is not None
            data = source.read()
            if member.name == HEAD:
                was, data = data, head
            elif member.name == SUMS:
                data = data.replace(sha256(was).hexdigest().encode(), sha256(head).hexdigest().encode())
            member.size = len(data)
            if pax and member.name == said_of:
                member.pax_headers = pax
            new.addfile(member, io.BytesIO(data))
    return target


SPARSE = {"GNU.sparse.size": str(2**33), "GNU.sparse.map": "0,1"}


@pytest.mark.parametrize(
    ("name", "pax", "said"),
    [
        (HEAD, SPARSE, HEAD),
        *(pytest.param(name, SPARSE, name, marks=pytest.mark.test_all) for name in (SUMS, "rules.yaml")),
        pytest.param(HEAD, {"comment": "x" * 120_000_000}, "a head of 1200", marks=pytest.mark.test_all),
        (SUMS, {"path": "x" * 120_000_000}, "a head of 1200"),
    ],
)
def test_a_member_that_takes_much_memory_is_refused_before_it_is_read(
    tmp_path: Path, name: str, pax: dict[str, str], said: str
):
    a_folder(tmp_path / "line")
    archive = backed_up(tmp_path / "line")
    with tarfile.open(archive) as tar:
        source = tar.extractfile(HEAD)
        assert source is not None
        bad = with_head(archive, tmp_path / "bad.tar", source.read(), pax, name)
    code = (
        "import resource, sys; from pathlib import Path; from tools.terminal.console import CommandError\n"
        "from tools.backup.restore import unpack\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: unpack(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except CommandError as error: print(error)\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000\n"
    )
    command = [sys.executable, "-c", code, str(bad), str(tmp_path / "restored")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "bad.tar" in done.stdout
    assert said in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.tar", "line", "line.tar"]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_an_archive_says_it_is_restored_or_refused_in_a_sentence(tmp_path: Path, seed: int):
    a_folder(tmp_path / "line")
    archive = backed_up(tmp_path / "line")
    heads = [b"[" * 60_000, b"[]", b"null", b"1" * 5000, b" " * 2**20, b'{"coserve_backup": 1e400}', b"\xff"]
    right: dict[str, Any] = {"coserve_backup": 2, "coserve": "0", "made": "", "schema": None}
    right |= {"last_seq": 0, "waiting": 0, "highest_edition": 1}
    wrong: list[Any] = [[], {}, "x", 1.5, None]
    heads += [json.dumps({**right, key: value}).encode() for key in right for value in wrong]
    heads += [json.dumps({key: right[key] for key in right if key != left}).encode() for left in right]
    bad = with_head(archive, tmp_path / "bad.tar", heads[seed % len(heads)])
    if seed >= len(heads):
        data, chance = bytearray(archive.read_bytes()), random.Random(seed)
        for _ in range(8):
            data[chance.randrange(min(len(data), 8192))] = chance.choice(b"\0\x01xgLKS057\xff")
        bad.write_bytes(data)
    with contextlib.suppress(CommandError):
        unpack(bad, tmp_path / "restored")
        return
    assert not (tmp_path / "restored").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("key", "value"), [("coserve_backup", 1), ("coserve_backup", 3), ("schema", "99.0.0")])
def test_a_backup_of_another_version_names_the_version_to_install(tmp_path: Path, key: str, value: object):
    a_folder(tmp_path / "line")
    archive = backed_up(tmp_path / "line")
    with tarfile.open(archive) as tar:
        head = json.loads(getattr(tar.extractfile(HEAD), "read", bytes)())
    head |= {"coserve": "7.0.1", key: value} | ({"last_seq": {"of": "another type"}} if value == 3 else {})
    newer = with_head(archive, tmp_path / "newer.tar", json.dumps(head).encode())
    with pytest.raises(CommandError, match=r"made by CoServe 7\.0\.1 .*install CoServe 7\.0\.1 or newer"):
        unpack(newer, tmp_path / "restored")


def test_nothing_is_ever_restored_over_files_that_are_there(tmp_path: Path):
    a_folder(tmp_path / "line")
    archive = backed_up(tmp_path / "line")
    with pytest.raises(CommandError, match="not an empty folder"):
        unpack(archive, tmp_path / "line")
    coserve("restore", archive, tmp_path / "line", status=2)
    (tmp_path / "empty").mkdir()
    assert unpack(archive, tmp_path / "empty").config.exists()


def test_a_file_that_is_no_archive_is_never_overwritten(tmp_path: Path):
    config = a_folder(tmp_path / "line")
    with pytest.raises(CommandError, match=r"rules\.yaml exists and is not an archive"):
        write_backup(config, tmp_path / "line" / "rules.yaml")
    assert (tmp_path / "line" / "rules.yaml").read_text() == RULES


def test_a_database_from_before_the_first_release_is_refused(tmp_path: Path, writing: Writing):
    writing.accept()
    sql(tmp_path / "line", "ALTER TABLE editions RENAME TO earlier")
    with pytest.raises(CommandError, match=r"from before 0\.1\.0: coserve check says what to do"):
        write_backup(tmp_path / "line" / "coserve.yaml", tmp_path / "line.tar")


def test_a_backup_that_fails_leaves_the_last_one_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = a_folder(tmp_path / "line")
    archive = backed_up(tmp_path / "line")
    good = archive.read_bytes()
    config.write_text(CONFIG.replace("rules:", "regeln:"), encoding="utf-8")
    assert "regeln" in coserve("backup", config, archive, status=1).stderr
    config.write_text(CONFIG, encoding="utf-8")
    Store(f"sqlite:///{tmp_path}/line/inspection.db").close()
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CommandError, match=r"of the database needs [\d.]+ [kM]B in .* and 1 kB are free: make room"):
        write_backup(config, archive)
    (tmp_path / "line" / "journal").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=60 * 10**6))
    with pytest.raises(CommandError, match="what the line keeps free, needs 67"):
        write_backup(config, archive)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CommandError, match="the restored line needs"):
        unpack(archive, tmp_path / "restored")
    assert archive.read_bytes() == good
    assert sorted(path.name for path in tmp_path.iterdir()) == ["line", "line.tar"]


#: The disk fills after the room was looked at.
NO_LOOK = """
from tools.backup import archive, restore
archive.need_room = restore.room_problem = lambda *_: None
from tools.cli.main import main
main()
"""


@pytest.mark.promise(
    "Upgrades, ways back, backups",
    "A full disk ends a backup, a restore and an export with a sentence and leaves no half file; devices are "
    "neither written nor replaced; names that are not UTF-8 are kept or refused in a sentence; nothing is "
    "restored into the folder of a line that runs",
)
@pytest.mark.parametrize(
    "size", ["12k", "270k", *(pytest.param(size, marks=pytest.mark.test_all) for size in ("100k", "350k"))]
)
def test_a_full_disk_ends_a_backup_and_a_restore_in_a_sentence_and_leaves_nothing(tmp_path: Path, size: str):
    """While the copy of the database is made, while the archive is written, and while it is unpacked."""
    config = a_folder(tmp_path / "line")
    Store(f"sqlite:///{tmp_path}/line/inspection.db").close()
    archive = backed_up(tmp_path / "line")
    with small_disk(tmp_path / "disk", size=size) as disk:
        for words in (("backup", config, disk / "line.tar"), ("restore", archive, disk / "line")):
            command = [sys.executable, "-c", NO_LOOK, *map(str, words)]
            run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
            if size in {"270k", "350k"} and words[0] == "restore":
                assert run.returncode == 0, "it fits: nothing but the size ends the others"
                continue
            assert run.returncode == 1
            assert run.stderr.startswith("coserve: ")
            assert f"{words[-1]}: No space left on device; make room" in run.stderr or "disk is full" in run.stderr
            assert list(disk.iterdir()) == []


@pytest.mark.parametrize("device", ["/dev/null", "/dev/full"])
def test_a_device_is_neither_written_nor_replaced(tmp_path: Path, device: str):
    new = tmp_path / "new"
    config = a_folder(tmp_path / "line")
    backed_up(tmp_path / "line")
    for status, words in (
        (1, ("backup", config, device)),
        (2, ("restore", tmp_path / "line.tar", device)),
        (2, ("restore", device, new)),
    ):
        done = coserve(*words, status=status)
        assert isinstance(done.exception, SystemExit), "a sentence, and no traceback"
        assert device in done.stderr
    assert Path(device).is_char_device()
    assert not new.exists()


def test_names_that_are_not_utf_8_are_kept_or_refused_in_a_sentence(tmp_path: Path):
    name = os.fsdecode(b"caf\xe9")
    config = a_folder(tmp_path / "line", CONFIG + "security: {server_key: s, allowed_clients: keys}\n")
    (tmp_path / "line" / "keys").mkdir()
    (tmp_path / "line" / "keys" / f"{name}.key").write_text("a key")
    unpack(backed_up(tmp_path / "line"), tmp_path / "new")
    assert (tmp_path / "new" / "keys" / f"{name}.key").read_text() == "a key"
    Store(f"sqlite:///{tmp_path}/line/inspection.db").close()
    config.write_text(CONFIG)
    refused = [("backup", config, tmp_path / f"{name}.tar")]
    refused.append(("results", "--parquet", tmp_path / f"{name}.parquet", "--config", config))
    shutil.copytree(tmp_path / "line", tmp_path / name)
    refused.append(("check", tmp_path / name / "coserve.yaml"))
    before = sorted(tmp_path.iterdir())
    for words in refused:
        run = start_coserve(*words)
        assert (run.returncode, "names of files and folders must be UTF-8" in run.stderr) == (2, True), run.stderr
        assert "Traceback" not in run.stderr
    assert sorted(tmp_path.iterdir()) == before


#: The command waits in the midst of its archive.
HALF_WAY = "from tools.backup import archive; archive.forget_members = stop"


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP])
def test_a_backup_that_is_stopped_leaves_nothing_half_written(tmp_path: Path, end: signal.Signals):
    config = a_folder(tmp_path / "line")
    with paused_coserve(HALF_WAY, "backup", config, tmp_path / "line.tar") as process:
        assert (tmp_path / ".line.tar.part").exists()
        process.send_signal(end)
        _, message = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, f"stopped by {end.name}" in message) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["line"]


@pytest.mark.promise("Upgrades, ways back, backups", "A backup leaves the page cache unchanged")
def test_reading_for_a_backup_neither_evicts_nor_adds_to_what_memory_holds(tmp_path: Path):
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(4 * 2**20))
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cached(fd):
            pytest.skip("this file system keeps every page in memory: run with a temporary folder on a disk")
        read_all(GentleReader(fd, 4 * 2**20))
        assert not is_cached(fd)
        path.read_bytes()
        assert is_cached(fd)
        read_all(GentleReader(fd, 4 * 2**20))
        assert is_cached(fd)
    finally:
        os.close(fd)


def is_cached(fd: int) -> bool:
    return not absent_pages(fd, 2**20, 2**20)


def read_all(reader: GentleReader) -> None:
    while reader.read():
        pass
