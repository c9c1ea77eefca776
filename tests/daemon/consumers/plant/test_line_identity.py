"""What a line is to a hub that has its name: a table, without any database."""

from typing import Any

import pytest

from daemon.consumers.plant.identity import situation_of

HERE = {"identity": "pc-1", "epoch": "e1", "accepts": False}
ACCEPTS = HERE | {"accepts": True}


@pytest.mark.parametrize(
    ("known", "identity", "epoch", "is_free", "has_last", "situation"),
    [
        (None, "pc-1", "e1", True, True, "new"),
        (None, "pc-1", "e1", False, True, "still_connected"),  # another program has just come as this line
        (HERE, "pc-1", "e1", True, True, "same"),
        (HERE, "pc-1", "e1", False, True, "still_connected"),
        (HERE, "pc-2", "e1", True, True, "moved"),
        (HERE, "pc-2", "e1", False, True, "taken"),
        (ACCEPTS, "pc-2", "e1", False, True, "taken"),
        (HERE, "pc-1", "e1", True, False, "copy"),
        (ACCEPTS, "pc-2", "e1", True, False, "copy"),  # nobody accepts that numbers come twice
        (HERE, "pc-1", "e2", True, True, "restored"),
        (HERE, "pc-1", "e2", True, False, "restored"),
        (HERE, "pc-2", "e2", True, False, "unknown"),
        (ACCEPTS, "pc-2", "e2", True, False, "replaced"),
        (ACCEPTS, "pc-2", "e2", False, False, "taken"),
    ],
)
def test_a_line_that_connects_is_one_of_nine_things_to_its_hub(
    known: Any, identity: str, epoch: str, is_free: bool, has_last: bool, situation: Any
) -> None:
    assert situation_of(known, identity, epoch, is_free=is_free, has_last=has_last) == situation
