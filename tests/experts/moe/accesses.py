"""What brownout does with the gates' choices, counted by an observer of a runtime."""

from experts.moe.gating import ForwardStep, Routing


class Accesses:
    """Experts that the gates chose and experts that ran; choices in all, by united experts, and dropped."""

    def __init__(self, experts: int) -> None:
        self._sentinel = experts
        self.wanted = self.originals = self.united = 0
        self.choices = self.choices_united = self.choices_dropped = 0

    def __call__(self, _step: ForwardStep, gate: Routing, carried_out: Routing) -> None:
        self.wanted += len(gate.distinct_experts())
        ran = carried_out.distinct_experts()
        self.originals += sum(expert < self._sentinel for expert in ran)
        self.united += sum(expert > self._sentinel for expert in ran)
        self.choices += gate.index.numel()
        self.choices_united += int((carried_out.index > self._sentinel).sum())
        self.choices_dropped += int(((carried_out.index == self._sentinel) & (gate.index != self._sentinel)).sum())

    @property
    def share(self) -> float:
        """Experts run as a share of those wanted."""
        return (self.originals + self.united) / self.wanted if self.wanted else 1.0
