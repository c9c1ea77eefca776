"""`python -m daemon.shadow CONFIG SOCKET --heart FD`: answers in shadow, as a process that the daemon keeps running.

It infers as the line does, one image at a time on the CPU; the daemon judges the answers.
"""

import json
import os
import resource
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from daemon.config.settings import load_config
from daemon.host.children import live_with_parent
from daemon.line.line import weights_folders
from daemon.records import JournalKey
from daemon.shadow.shadows import MAX_MESSAGE_BYTES
from daemon.storage.journal import Journal, JournalError
from experts.catalog import CatalogFile, resolve
from experts.editions.folder import EditionFolder
from experts.editions.history import experts_of
from experts.errors import ImageError
from experts.spec import ExpertId, resident_in
from experts.vision.infer import infer
from experts.vision.preprocess import prepare
from experts.vision.slot import SlotPool

#: Of Python, torch and one image; the experts come on top, once in their slots and once for what is read.
_PROCESS_BYTES = 1 << 30
_BEAT_S = 1.0


class ShadowJudge:
    """The versions in shadow, read once. `problems` says of each that cannot answer why."""

    def __init__(self, path: Path) -> None:
        self._config = load_config(path)
        experts = experts_of(EditionFolder(self._config.catalog)).values()
        self._versions = {expert.name: expert.shadow.version for expert in experts if expert.shadow}
        entries = {each.name: each.versions[each.shadow.version].entry for each in experts if each.shadow}
        root, folders = self._config.catalog.parent, weights_folders(self._config)
        self._specs, problems = resolve(CatalogFile(experts=entries), root, folders)
        self.problems = {str(where[1]): message for where, message in problems}
        weights_bytes = sum(spec.weights_bytes for spec in resident_in(self._specs).values())
        limit = _PROCESS_BYTES + 2 * weights_bytes
        with suppress(ValueError):  # a stricter limit is in force already
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        self._pool = SlotPool("cpu", max(1, weights_bytes))

    def answer(self, image: dict[str, Any]) -> dict[str, Any]:
        """Return the message about an image: the answer, its expert's `problem`, or neither if it is left out."""
        expert = image["expert"]
        about = {name: image[name] for name in ("inspection_id", "step", "expert")}
        if expert in self.problems or self._versions.get(expert) != image["version"]:
            return about
        try:
            answer = about | self._infer(image)
        except (JournalError, ImageError):  # its bytes are gone: its verdict is older
            return about
        except Exception as error:  # noqa: BLE001  no answer of this version can be trusted
            self.problems[expert] = str(error) or type(error).__name__
        else:
            if len(json.dumps(answer)) <= MAX_MESSAGE_BYTES:
                return answer
            self.problems[expert] = f"{len(answer['boxes'])} boxes in an image are too many: lower its max_detections"
        return about | {"problem": self.problems[expert]}

    def _infer(self, image: dict[str, Any]) -> dict[str, Any]:
        spec, shape = self._specs[ExpertId(image["expert"])], image["shape"]
        if spec.resident.expert not in self._pool.resident():
            self._pool.load(spec.resident)
        # A reader that stays would hold a deleted segment.
        payload = Journal(self._config.journal).read(JournalKey(*image["key"]))
        limit = self._config.limits.max_pixels
        prepared = prepare(payload, image["encoding"], shape and tuple(shape), spec.resident, limit)
        begin_s = time.perf_counter()
        (answer,) = infer(self._pool.slot(spec.resident.expert), [prepared], spec)
        infer_ms = (time.perf_counter() - begin_s) * 1000.0
        boxes = [(each.label, each.confidence, each.box) for each in answer.detections]
        size = (prepared.width, prepared.height)
        answered = {"label": answer.label, "confidence": answer.confidence, "boxes": boxes}
        return answered | {"size": size, "infer_ms": infer_ms}


def main() -> None:
    live_with_parent()
    config, fd, _, heart = sys.argv[1:]
    torch.set_num_threads(1)
    with suppress(psutil.Error, OSError):  # a sandbox may forbid it
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    shadows, line = ShadowJudge(Path(config)), socket.socket(fileno=int(fd))
    messages = [{"expert": expert, "problem": problem} for expert, problem in shadows.problems.items()]
    while True:
        os.eventfd_write(int(heart), 1)
        line.settimeout(None)
        for message in messages:
            line.send(json.dumps(message).encode())
        messages.clear()
        line.settimeout(_BEAT_S)
        with suppress(TimeoutError):
            messages.append(shadows.answer(json.loads(line.recv(MAX_MESSAGE_BYTES))))


if __name__ == "__main__":
    main()
