"""How tests wait for what comes soon: the limit only ends what hangs, and nothing is asserted of it."""

import time
from collections.abc import Callable
from typing import TypeVar

#: A crowded machine stands still for seconds, and for a minute where it starts processes.
PATIENCE_S = 120.0
_LOOK_EVERY_S = 0.01
T = TypeVar("T")


def until(happened: Callable[[], T], say: Callable[[], object] = lambda: "") -> T:
    """What `happened()` gives, once that is true; where it hangs, the test fails with what `say()` tells."""
    until_s = time.monotonic() + PATIENCE_S
    while not (found := happened()):
        assert time.monotonic() < until_s, f"it did not happen within {PATIENCE_S:g} s: {say()}"
        time.sleep(_LOOK_EVERY_S)
    return found
