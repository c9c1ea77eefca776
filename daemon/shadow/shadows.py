"""The daemon's side of versions in shadow: images to their process, answers from it to the database.

Nothing here blocks the line: an image that does not fit into the socket is left out and counted. The process reads an
image in the journal while it is there. Messages are JSON in both directions (docs/security.md).
"""

import json
import socket
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from daemon.host.children import Children, ChildSpec
from daemon.records import Image
from daemon.shadow.comparison import add_answers, outcome_text
from daemon.storage.writer import Writer
from experts.editions.edition import EditionError
from experts.editions.folder import EditionFolder
from experts.editions.history import experts_of
from experts.spec import Detection
from routing_rules.routes import Judgement, Step, judge

#: Interval at which images go to the process and answers come back: each turn takes the interpreter's lock once.
_TURN_S = 0.05
#: Images of one turn, and those that wait for an answer; the socket's buffer holds a few hundred.
_MAX_WAITING, _MAX_ASKED = 64, 1024
_BUFFER_BYTES = 128 * 1024
#: 300 boxes with the longest labels.
MAX_MESSAGE_BYTES = 128 * 1024
#: Interval at which answers are written, in one transaction.
_WRITE_EVERY_S = 5.0
#: At idle priority on a busy line a large network takes minutes for an image.
_HUNG_AFTER_S = 600.0


class ShadowImage(NamedTuple):
    """An image that an expert answered at a step, with the judgement before and after; `version` is in shadow."""

    image: Image
    version: str
    number: int
    step: Step
    before: Judgement | None
    judged: Judgement

    @property
    def question(self) -> bytes:
        image = self.image
        about = {"inspection_id": image.inspection_id, "step": self.number, "expert": self.step.expert}
        about |= {"version": self.version, "key": (image.key.segment, image.key.offset, image.key.length)}
        return json.dumps(about | {"encoding": image.pixels.encoding, "shape": image.pixels.shape}).encode()

    def row(self, answer: dict[str, Any]) -> dict[str, Any]:
        boxes = [Detection(label, confidence, tuple(box)) for label, confidence, box in answer["boxes"]]
        of_answer = answer["label"], answer["confidence"], boxes
        judged = judge(self.step, *of_answer, self.before, tuple(answer["size"]))
        names = ("inspection_id", "step", "expert", "label", "confidence", "infer_ms")
        outcomes = {"outcome": outcome_text(judged), "outcome_in_service": outcome_text(self.judged)}
        return {**{name: answer[name] for name in names}, "expert_version": self.version, **outcomes}


class Shadows:
    """The versions in shadow, and their process, which runs only while there are any."""

    def __init__(self, catalog: Path, config: Path, writer: Writer) -> None:
        """`config` is the path of coserve.yaml, for the process."""
        self._catalog, self._config, self._writer = catalog, config, writer
        self._versions: dict[str, str] = {}
        self._waiting: deque[ShadowImage] = deque()
        self._asked: OrderedDict[tuple[int, int], ShadowImage] = OrderedDict()
        # Both ends stay open here: what waits in them outlives the process, and the next one goes on with it.
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._children, self._is_old = Children(), False
        self._changing, self._stopping = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="shadow", daemon=True)
        self._answers, self._dropped = Counter[str](), Counter[str]()
        self._problems: dict[str, str] = {}
        self._log: Any = structlog.get_logger("shadow")

    def offer(self, answers: Iterable[tuple[Image, int, Step, Judgement | None, Judgement]]) -> None:
        for image, number, step, before, judged in answers:
            version = self._versions.get(step.expert)
            if version is not None and len(self._waiting) < _MAX_WAITING:
                self._waiting.append(ShadowImage(image, version, number, step, before, judged))
            elif version is not None:
                self._dropped[step.expert] += 1

    def read(self) -> None:
        """Read which versions are in shadow, at the start and after each change, and restart their process."""
        try:
            experts = experts_of(EditionFolder(self._catalog))
        except (EditionError, OSError) as error:
            self._log.warning("shadows_unreadable", problem=str(error))
            return
        versions = {name: expert.shadow.version for name, expert in experts.items() if expert.shadow is not None}
        with self._changing:
            if versions == self._versions and not self._problems:
                return
            self._versions, self._problems, self._is_old = versions, {}, True
            if self._thread.ident is None:
                self._thread.start()

    def status(self) -> list[dict[str, Any]]:
        """Return `expert`, `version`, `answers` and `dropped` since the start, and `problem` of each."""
        ends = [child["last_end"] for child in self._children.status() if child["state"] == "waiting"]
        ended = next((f"its process ended: {end}" for end in ends if end), None)
        return [
            {"expert": expert, "version": version, "answers": self._answers[expert], "dropped": self._dropped[expert]}
            | {"problem": self._problems.get(expert, ended)}
            for expert, version in self._versions.items()
        ]

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._ours.close()
        self._theirs.close()

    def _run(self) -> None:
        rows: list[dict[str, Any]] = []
        write_at_s, is_last = 0.0, False
        while not is_last:
            is_last = self._stopping.wait(_TURN_S)
            try:
                if self._is_old or is_last:
                    self._is_old = False  # before the versions are read, which may change at any moment
                    self._restart(self._versions if not is_last else {})
                self._hand_over()
                with suppress(BlockingIOError):
                    while True:
                        self._take(json.loads(self._ours.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)), rows)
                if rows and (is_last or time.monotonic() >= write_at_s):
                    taken, rows, write_at_s = rows, [], time.monotonic() + _WRITE_EVERY_S
                    self._writer.run(lambda store, taken=taken: store.transact(add_answers, taken)).result()
            except Exception:  # noqa: BLE001  the thread lives on
                self._log.exception("shadow_answers_lost")

    def _restart(self, versions: dict[str, str]) -> None:
        """End the process, which takes seconds at idle priority; start the next if there are `versions`."""
        self._children.stop()
        self._children, fd = Children(), self._theirs.fileno()
        if versions:
            argv = (sys.executable, "-m", "daemon.shadow", str(self._config), str(fd))
            priority = {"nice": 19, "is_idle": True, "beats": True, "hung_after_s": _HUNG_AFTER_S}
            self._children.start([ChildSpec("shadow", argv, pass_fds=(fd,), **priority)])

    def _hand_over(self) -> None:
        has_room = True
        while self._waiting:
            image = self._waiting.popleft()
            try:
                if has_room:
                    self._ours.send(image.question, socket.MSG_DONTWAIT)
                    self._asked[image.image.inspection_id, image.number] = image
            except OSError:  # it is full
                has_room = False
            self._dropped[image.step.expert] += not has_room
        while len(self._asked) > _MAX_ASKED:  # a process that ended has lost them
            self._asked.popitem(last=False)

    def _take(self, message: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        expert, problem = message["expert"], message.get("problem")
        asked = self._asked.pop((message.get("inspection_id", 0), message.get("step", 0)), None)
        if asked is not None and "label" in message:
            self._answers[expert] += 1
            rows.append(asked.row(message))
        elif problem is None:
            self._dropped[expert] += 1
        elif self._problems.setdefault(expert, problem) is problem:
            self._log.warning("shadow_failed", expert=expert, problem=problem)
