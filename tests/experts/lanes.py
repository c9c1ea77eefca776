"""A copy stream for machines without a GPU."""

from collections.abc import Callable
from functools import partial

import torch


class LateLane:
    """A lane as late as one may be: copies are carried out only when somebody waits for them."""

    def __init__(self, _device: torch.device | None = None, pages: int = 2) -> None:
        self.given: list[Callable[[], object]] = []
        self._marks = [0] * pages
        self._done = 0

    def begin(self) -> None:
        """Copies wait for nothing but this lane."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.given.append(partial(target.copy_, source))

    def run(self, work: Callable[[], object]) -> None:
        self.given.append(work)

    def mark(self, page: int) -> None:
        self._marks[page] = len(self.given)

    def wait(self, page: int) -> None:
        self._carry_out(self._marks[page])

    def finish(self) -> None:
        self._carry_out(len(self.given))

    def _carry_out(self, until: int) -> None:
        for work in self.given[self._done : until]:
            work()
        self._done = max(self._done, until)
