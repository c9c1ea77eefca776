"""Loading on demand: nothing is fetched before the gate has spoken, and computing waits for each expert it lacks."""

from experts.moe.model.mode import BaseMode


class OnDemand(BaseMode):
    """Slots evicted by last use, every fetch blocking: what systems without prediction do."""

    name = "ondemand"
