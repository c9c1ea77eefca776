"""The worker's cache of weights: verified, bounded, the least recently used goes first."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from daemon.cluster.expert_cache import CacheError, ExpertCache

KB = 1000


def a_file(seed: int, size: int = 4 * KB) -> tuple[str, bytes]:
    content = bytes([seed]) * size
    return hashlib.sha256(content).hexdigest(), content


def put(cache: ExpertCache, digest: str, content: bytes, chunk: int = KB) -> None:
    for offset in range(0, len(content), chunk):
        cache.take(digest, len(content), offset, content[offset : offset + chunk])


def names(cache: ExpertCache) -> set[str]:
    return {path.name for path in cache.folder.iterdir()}


def test_a_file_is_there_once_it_is_whole_and_survives_a_restart(tmp_path: Path):
    cache, (digest, content) = ExpertCache(tmp_path, 10 * KB), a_file(1)
    cache.take(digest, 4 * KB, 0, content[:KB])
    assert cache.missing([digest]) == [digest]
    put(cache, digest, content)
    assert cache.missing([digest]) == []
    assert (tmp_path / digest).read_bytes() == content
    assert ExpertCache(tmp_path, 10 * KB).missing([digest]) == []
    assert names(cache) == {digest}


def test_the_least_recently_used_file_makes_room_and_the_folder_never_exceeds_its_size(tmp_path: Path):
    cache = ExpertCache(tmp_path, 10 * KB)
    files = [a_file(seed) for seed in range(4)]
    for number, (digest, content) in enumerate(files[:2]):
        put(cache, digest, content)
        os.utime(tmp_path / digest, (number, number))
    cache.missing([files[0][0]])  # a load uses it
    put(cache, *files[2])
    assert names(cache) == {files[0][0], files[2][0]}
    put(cache, *files[3])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 10 * KB


def test_a_file_that_is_used_again_soon_does_not_look_changed(tmp_path: Path):
    cache, (digest, content) = ExpertCache(tmp_path, 10 * KB), a_file(1)
    put(cache, digest, content)
    since_s = time.time() - 60.0
    os.utime(tmp_path / digest, (since_s, since_s))
    before = (tmp_path / digest).stat()
    assert cache.missing([digest]) == []
    assert (tmp_path / digest).stat().st_mtime_ns == before.st_mtime_ns
    later = [a_file(2), a_file(3)]
    put(cache, *later[0])
    assert cache.missing([digest]) == []
    put(cache, *later[1])
    assert names(cache) == {digest, later[1][0]}, "it was used later than the other arrived"
    os.utime(tmp_path / digest, (0, 0))
    assert cache.missing([digest]) == []
    assert (tmp_path / digest).stat().st_mtime > 0


def test_altered_bytes_are_refused_and_leave_nothing(tmp_path: Path):
    cache, (digest, content) = ExpertCache(tmp_path, 10 * KB), a_file(1)
    with pytest.raises(CacheError, match="the bytes that arrived are"):
        put(cache, digest, content[:-1] + b"x")
    assert names(cache) == set()
    put(cache, digest, content)
    assert names(cache) == {digest}


@pytest.mark.parametrize(
    ("digest", "size", "offset", "says"),
    [
        ("../../etc/passwd", 4 * KB, 0, "is not a sha256"),
        (a_file(1)[0], 11 * KB, 0, "raise --cache-size"),
        (a_file(1)[0], 4 * KB, 2 * KB, "wrong order"),
    ],
)
def test_what_cannot_be_a_part_of_a_file_is_refused(tmp_path: Path, digest: str, size: int, offset: int, says: str):
    cache = ExpertCache(tmp_path, 10 * KB)
    with pytest.raises(CacheError, match=says):
        cache.take(digest, size, offset, bytes(KB))
    assert names(cache) == set()


def test_what_a_worker_that_died_left_unfinished_is_removed(tmp_path: Path):
    digest, content = a_file(1)
    (tmp_path / f"{digest}.0.part").write_bytes(content)
    put(ExpertCache(tmp_path, 10 * KB), digest, content)
    assert {path.name for path in tmp_path.iterdir()} == {digest}
