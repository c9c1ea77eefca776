"""Repeats a recorded trace without clock or devices: a scheduler of the same parts must decide the same."""

import json
from pathlib import Path
from typing import Any

from pydantic import validate_call
from pydantic_core import to_json

from daemon.dispatch.trace import Call, read_calls, read_makeup
from daemon.policy.operate import OperationRefusedError


def replay(path: Path) -> list[tuple[Call, Any]]:
    """Return the calls whose repeated result differs from the recorded one, with the repeated one."""
    scheduler, repeated = read_makeup(path).scheduler(), list[tuple[Call, Any]]()
    for call in read_calls(path):
        try:
            result = {"result": validate_call(getattr(scheduler, call.name))(*call.arguments)}
        except OperationRefusedError as error:
            result = {"refused": error.code}
        repeated.append((call, json.loads(to_json(result))))
    return [(call, result) for call, result in repeated if result != call.recorded]
