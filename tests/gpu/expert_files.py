"""The experts of `make gpu`: as many different files as the disk and the time allow."""

import hashlib
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import yaml

from experts.catalog import write_catalog
from experts.durable import replacing
from experts.reading import drop_cached
from experts.spec import ExpertId, ExpertSpec
from experts.weights import file_sha256, read_header
from tests.bench.live.expert_files import ExpertRecipe, make_experts, read_experts

#: Bytes of the disk that stay free for other programs.
_RESERVE_BYTES = 4 << 30
#: Files are made by so many threads; NumPy, sha256 and the disk release the interpreter lock.
_THREADS = 4
#: Weights differ from file to file in the lowest 12 of 24 bits (zeros stay): pages differ, and outputs stay finite.
_CHANGED_BITS = 12


def make_expert_files(folder: Path, recipe: ExpertRecipe, limit_s: float) -> tuple[Path, int]:
    """Return the catalog of the recipe's experts in `folder`, and how many of them have a file of their own.

    The others read the files of these in turn. Files are made until the disk has `_RESERVE_BYTES` left or `limit_s`
    seconds have passed; those that an earlier run made are used. Raises OSError, TrainingError.
    """
    names = recipe.detector_names + recipe.classifier_names
    began_s = time.monotonic()
    first = make_experts(folder / "first", replace(recipe, classifiers=1, detectors=1))
    specs = read_experts(first)
    kinds = {name: specs[ExpertId(kind[0])] for kind in _kinds(recipe) for name in kind}
    digests: dict[str, str] = {}

    def make(name: str) -> None:
        spec, file = kinds[name], folder / f"{name}.safetensors"
        size_bytes = spec.file.stat().st_size
        is_made = file.is_file() and file.stat().st_size == size_bytes
        left_bytes = shutil.disk_usage(folder).free - _THREADS * size_bytes
        has_room = left_bytes > _RESERVE_BYTES and time.monotonic() - began_s < limit_s
        if is_made or has_room or name in (kind[0] for kind in _kinds(recipe)):
            digests[name] = file_sha256(file) if is_made else _vary(spec, file, seed=names.index(name))

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(make, names))
    entries: dict[str, dict[str, object]] = {}
    of_first = yaml.safe_load(first.read_text(encoding="utf-8"))["experts"]
    for kind in _kinds(recipe):
        own = [name for name in kind if name in digests]
        for number, name in enumerate(kind):
            source = own[number % len(own)]
            changed = {"file": f"{source}.safetensors", "sha256": digests[source]}
            entries[name] = of_first[kind[0]] | changed
    write_catalog(folder / "catalog.yaml", entries)
    # As make_experts marks what it has made, so that the live benchmark finds it.
    (folder / "recipe.json").write_text(json.dumps(asdict(recipe)), encoding="utf-8")
    return folder / "catalog.yaml", len(digests)


def _kinds(recipe: ExpertRecipe) -> tuple[list[str], list[str]]:
    return recipe.detector_names, recipe.classifier_names


def _vary(spec: ExpertSpec, file: Path, seed: int) -> str:
    """Write an expert whose weights differ from those of `spec` a little, all of them; return its sha256."""
    data = np.fromfile(spec.file, np.uint8)
    words = data[read_header(spec.file).data_start :].view(np.uint32)
    changes = np.random.default_rng(seed).integers(0, 1 << _CHANGED_BITS, len(words), dtype=np.uint32)
    words ^= np.where(words, changes, 0).astype(np.uint32)  # zeros stay: tiny numbers would be slow on a CPU
    with replacing(file) as part:
        data.tofile(part)
    drop_cached(file)
    return hashlib.sha256(data.data).hexdigest()
