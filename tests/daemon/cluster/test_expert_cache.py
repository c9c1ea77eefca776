"""The worker's cache of weights: verified, bounded, the least recently used goes first."""

import hashlib
import os
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
