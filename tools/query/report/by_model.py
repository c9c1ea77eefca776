"""A board's report written by a language model that the running line serves."""

import json
import time
import uuid
from typing import Any

import zmq

from daemon.config.settings import Config
from daemon.wire.control import ControlError, must_listen
from daemon.wire.frames import MAGIC, encode
from tools.query.report.board import BoardReport, in_words

_SOURCE = "report"
_POLL_S = 0.1


class NoTextError(Exception):
    """The model wrote nothing; the text says why."""


def written_by(config: Config, model: str, board: BoardReport, wait_s: float) -> str:
    """The model's words. Raises NoTextError: there is no daemon, it refuses, or it takes longer than `wait_s`."""
    endpoint = next((place for place in config.endpoints.intake if place.startswith("ipc://")), None)
    if endpoint is None:
        raise NoTextError("the line has no ipc endpoint among endpoints.intake to ask it by")
    try:
        must_listen(endpoint)
    except ControlError as error:
        raise NoTextError(error.reason) from None
    until_s = time.monotonic() + wait_s
    context: zmq.Context[Any] = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(endpoint)

        def ask(header: dict[str, Any]) -> dict[str, Any]:
            dealer.send_multipart([MAGIC, encode(header)])
            if not dealer.poll(max(1, int((until_s - time.monotonic()) * 1000))):
                raise NoTextError(f"the daemon did not answer within {wait_s:g} s")
            return json.loads(dealer.recv_multipart()[-1])

        since = ask({"type": "hello"})["last_seq"]
        request_id = f"report-{uuid.uuid4().hex}"
        answer = ask(_request(config, model, board, request_id, wait_s))
        if answer["type"] != "accepted":
            raise NoTextError(f"the daemon refused it: {answer.get('reason', answer['type'])}")
        while time.monotonic() < until_s:
            page = ask({"type": "results_since", "seq": since, "limit": 1000})
            since = page.get("last_seq", since)
            for item in page.get("items", ()):
                if item["topic"] == f"generation/{_SOURCE}/" and item["id"] == request_id:
                    return _text(item)
            if not page.get("more"):
                time.sleep(_POLL_S)
    finally:
        context.destroy(linger=0)
    raise NoTextError(f"it wrote nothing within {wait_s:g} s")


def _text(item: dict[str, Any]) -> str:
    if item["status"] != "done":
        raise NoTextError(f"it could not be done: {item['reason']}")
    if not (item["text"] or "").strip():
        raise NoTextError("it wrote an empty text")
    return item["text"].strip()


def _request(config: Config, model: str, board: BoardReport, request_id: str, wait_s: float) -> dict[str, Any]:
    tasks = config.models[model].tasks
    return {
        "type": "generate",
        "id": request_id,
        "source": _SOURCE,
        "model": model,
        "task": "report" if "report" in tasks else None,
        "board": {"type": board.board_type, "serial": board.serial, "attempt": board.attempt},
        "deadline_ms": max(1, int(wait_s * 1000)),
        "prompt": f"Explain in plain words, for the person at the line, what is wrong with this board.\n\n"
        f"{in_words(board)}\n\nExplanation:",
    }
