"""Whether an expert's weights are what its entry says, in the way that a daemon would find out: by loading them."""

from collections.abc import Sequence
from pathlib import Path

from experts.catalog import CatalogEntry, CatalogFile, resolve
from experts.errors import ExpertError
from experts.slot import SlotPool
from experts.spec import ExpertId, ExpertSpec


def entry_problems(
    name: str, entry: CatalogEntry, root: Path, folders: Sequence[Path] = (), *, forward: bool = False
) -> list[str]:
    """Everything that is wrong with the weights of `entry`, whose file is relative to `root`; each with the file.

    Header and layout, order and shapes of all tensors, sha256, finite numbers; with `forward` also an answer.
    """
    catalog, problems = resolve(CatalogFile(experts={name: entry}), root, folders)
    if problems:
        return [_with_file(root / entry.file, f"{where[-1]}: {message}", message) for where, message in problems]
    spec = catalog[ExpertId(name)]
    return load_problems(spec, forward=forward)


def load_problems(spec: ExpertSpec, *, forward: bool) -> list[str]:
    """Why `spec` cannot be loaded and, with `forward`, run."""
    pool = SlotPool("cpu", spec.weights_bytes)
    try:
        pool.load(spec)
        if forward:
            _run(pool, spec)
    except ExpertError as error:
        return [_with_file(spec.file, error.message, error.message)]
    except (RuntimeError, MemoryError) as error:
        return [f"{spec.file}: cannot be run: {str(error).splitlines()[0]}"]
    return []


def _run(pool: SlotPool, spec: ExpertSpec) -> None:
    from experts.vision.infer import infer
    from experts.vision.preprocess import fit
    from tools.training.proof import pattern_images

    infer(pool.slot(spec.expert), [fit(image, spec.task, spec.input_size) for image in pattern_images()[:2]])


def _with_file(file: Path, text: str, message: str) -> str:
    return message if str(file) in message else f"{file}: {text}"
