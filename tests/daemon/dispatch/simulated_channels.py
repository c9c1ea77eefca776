"""Simulated channels of one machine, with the same time for every load."""

from daemon.dispatch.channels import copy_channel
from daemon.dispatch.simulated import Route, SimulatedChannel, SimulatedClock
from daemon.policy.actions import Load
from experts.spec import ExpertSpec


class SimulatedChannels:
    """Channels as daemon.dispatch.channels.Channels has them: one for the disk, others for copies within memory.

    A load takes `load_s` seconds from the disk, `copy_s` from another pool.
    """

    def __init__(self, clock: SimulatedClock, load_s: float = 0.0, copy_s: float = 0.0) -> None:
        self._clock = clock
        self._load_s, self._copy_s = load_s, copy_s
        self._disk = SimulatedChannel(clock)
        self._copying: dict[str, SimulatedChannel] = {}

    def route(self, load: Load, _spec: ExpertSpec) -> Route:
        """Return the way of a load, for `SimulatedPool`."""
        if load.source is None:
            return [(self._disk, self._load_s)]
        name = copy_channel(load.pool)
        if name not in self._copying:
            self._copying[name] = SimulatedChannel(self._clock)
        return [(self._copying[name], self._copy_s)]
