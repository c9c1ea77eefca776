"""A folder of releases: whole files only, none that is not what its name says, and none outside of it."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from daemon.registry.manifest import ReleaseError, SignedManifest, StoredFile
from daemon.registry.store import Store
from tests.daemon.registry.test_manifest import a_manifest

CONTENT = bytes(range(256)) * 10_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Link:
    """A source whose connection breaks after some bytes, or which sends others."""

    def __init__(self, content: bytes, breaks_after: int | None = None) -> None:
        self.content, self.breaks_after, self.starts = content, breaks_after, list[int]()

    def pieces(self, _sha256: str, start: int) -> Iterable[bytes]:
        self.starts.append(start)
        end = len(self.content) if self.breaks_after is None else start + self.breaks_after
        yield self.content[start:end]
        if self.breaks_after is not None:
            raise ReleaseError("the connection broke")


def test_a_fetch_that_broke_off_goes_on_where_it_stopped(tmp_path: Path):
    store = Store(tmp_path)
    with pytest.raises(ReleaseError, match="broke"):
        store.fetch(Link(CONTENT, breaks_after=1_000_000).pieces, SHA256, len(CONTENT))
    assert not store.has(SHA256)
    link = Link(CONTENT)
    assert store.fetch(link.pieces, SHA256, len(CONTENT)).read_bytes() == CONTENT
    assert link.starts == [1_000_000]
    store.fetch(link.pieces, SHA256, len(CONTENT))
    assert link.starts == [1_000_000]  # it is here


@pytest.mark.promise(
    "Prepared files",
    "a file of a release | other bytes; bytes without end | compared with its sha256, no more than the "
    "manifest says are written; deleted if they differ",
)
@pytest.mark.parametrize(
    "sent",
    [CONTENT[:-1] + b"x", CONTENT[:-1], CONTENT + b"x" * 10_000_000, b""],
    ids=["flipped", "short", "long", "no"],
)
def test_a_source_that_lies_about_bytes_leaves_nothing_behind(tmp_path: Path, sent: bytes):
    store = Store(tmp_path)
    with pytest.raises(ReleaseError, match="is damaged: its bytes do not have that sha256, and were deleted"):
        store.fetch(Link(sent).pieces, SHA256, len(CONTENT))
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_a_disk_without_room_is_said_before_anything_is_written(tmp_path: Path):
    with pytest.raises(ReleaseError, match="more bytes of free disk space are needed"):
        Store(tmp_path).fetch(Link(CONTENT).pieces, SHA256, 1 << 60)


@pytest.mark.parametrize("sha256", ["../" * 21 + "x", "A" * 64, "ab", "/etc/passwd", ""])
def test_a_name_that_is_not_a_digest_leads_to_no_file(tmp_path: Path, sha256: str):
    with pytest.raises(ReleaseError, match="is not a sha256"):
        Store(tmp_path).has(sha256)


def test_a_release_is_there_once_and_whole(tmp_path: Path):
    store, file = Store(tmp_path / "store"), tmp_path / "rules"
    file.write_bytes(CONTENT)
    signed = SignedManifest(a_manifest(rules=StoredFile(sha256=SHA256, bytes=len(CONTENT))).encoded(), b"signature\n")
    with pytest.raises(ReleaseError, match="1 of its files are missing"):
        store.add_manifest("line", 7, signed)
    assert store.names() == []
    store.add_object(file, SHA256)
    with pytest.raises(ReleaseError, match="its manifest says line/7"):
        store.add_manifest("line", 8, signed)
    store.add_manifest("line", 7, signed)
    store.add_manifest("line", 7, signed)
    store.add_manifest("line", 7, SignedManifest(signed.data, b"signature"))  # as it comes over HTTP
    with pytest.raises(ReleaseError, match="has another line/7 already"):
        store.add_manifest("line", 7, SignedManifest(signed.data, b"another\n"))
    assert (store.names(), store.numbers("line"), store.manifest("line", 7)) == (["line"], [7], signed)
    place = store.place(SHA256)
    place.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(ReleaseError, match="is damaged"):
        store.checked(SHA256, len(CONTENT))
    with pytest.raises(ReleaseError, match="has no release line/9"):
        store.manifest("line", 9)
    with pytest.raises(ReleaseError, match="does not name releases"):
        store.manifest("../line", 7)


def test_only_releases_that_are_not_kept_and_their_old_files_are_deleted(tmp_path: Path):
    store = Store(tmp_path / "store")
    contents = {number: CONTENT + bytes([number]) for number in (1, 2, 3, 4)}
    digests = {number: hashlib.sha256(content).hexdigest() for number, content in contents.items()}
    for number, content in contents.items():
        (tmp_path / "rules").write_bytes(content)
        store.add_object(tmp_path / "rules", digests[number])
        if number < 4:  # a push that has not brought its release yet
            rules = StoredFile(sha256=digests[number], bytes=len(content))
            signed = SignedManifest(a_manifest(number=number, rules=rules).encoded(), b"signature\n")
            store.add_manifest("line", number, signed)
    now = store.place(digests[4]).stat().st_mtime
    assert store.prune(lambda _, number: number > 1, now - 60) == 0  # new files stay for a push that is under way
    assert store.numbers("line") == [2, 3]
    assert store.has(digests[1])
    os.utime(store.place(digests[1]), (0, 0))
    os.utime(store.place(digests[2]), (0, 0))
    assert store.prune(lambda _, number: number > 1, now - 60) == 1
    assert [number for number in contents if store.has(digests[number])] == [2, 3, 4]
    reading = iter(store.pieces(digests[2], 0))
    first = next(reading)  # a pull that reads while its release is deleted ends well
    assert store.prune(lambda _, number: number > 2, now - 60) == 1
    assert first + b"".join(reading) == contents[2]
    with pytest.raises(ReleaseError, match="lacks the file"):
        store.pieces(digests[2], 0)


@pytest.mark.parametrize("name", ["manifests/line/7.json", "manifests/line/7.sig", "revoked/anna.sign"])
@pytest.mark.parametrize("kind", ["pipe", "large"])
def test_a_stick_with_a_pipe_or_a_file_of_any_size_in_place_of_a_small_one_is_refused(
    tmp_path: Path, name: str, kind: str
):
    store = Store(tmp_path)
    for each in ("manifests/line/7.json", "manifests/line/7.sig"):
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_bytes(b"x")
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.touch()
        os.truncate(file, 1 << 28)
    with pytest.raises(ReleaseError, match=r"is not a file of at most \d+ bytes"):
        (store.revoked if name.startswith("revoked") else lambda: store.manifest("line", 7))()
