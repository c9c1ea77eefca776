"""What brownout does with the gates' choices, counted by an observer of a runtime."""

from experts.moe.gating import ForwardStep, Routing


class Accesses:
    """Experts that the gates chose and experts that ran; choices in all, by united experts, and dropped."""

    def __init__(self, experts: int) -> None:
        self._sentinel = experts
        self.wanted = self.ran = self.choices = self.united = self.dropped = 0

    def __call__(self, _step: ForwardStep, gate: Routing, done: Routing) -> None:
        self.wanted += len(gate.distinct_experts())
        self.ran += len(done.distinct_experts())
        self.choices += gate.index.numel()
        self.united += int((done.index > self._sentinel).sum())
        self.dropped += int(((done.index == self._sentinel) & (gate.index != self._sentinel)).sum())

    @property
    def share(self) -> float:
        """Experts run as a share of those wanted."""
        return self.ran / self.wanted
