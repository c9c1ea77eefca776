"""Division of one device's memory between images and language models, images first.

A model has its maximum while images do not need the memory. When images wait for an expert that does not fit, models
shrink to their minimum and the images' pool gets the rest; when no image has been under way for a while, it goes back.
One side grows only after the other has shrunk, so that the sum never exceeds the device's budget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShare:
    """One model's share of its device: its maximum, and its minimum while images need memory."""

    model: str
    max_bytes: int
    min_bytes: int


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes in use now, or granted and not taken yet: the larger of the two."""

    images_bytes: int
    models_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Grant:
    """The budget of a model's experts from now on, or, without a model, that of the images' pool."""

    budget_bytes: int
    model: str | None = None


class Lease:
    """Decides grants: call `next_grant` after each grant, and from time to time.

    `total_bytes` is the memory of the device less the part that cannot be given up.
    """

    def __init__(
        self, total_bytes: int, shares: Sequence[ModelShare], *, give_back_s: float = 5.0, again_s: float = 30.0
    ) -> None:
        """`again_s` is the pause before a model that could not get memory is offered more again."""
        self.total_bytes = total_bytes
        self._shares = {share.model: share for share in shares}
        self._give_back_s = give_back_s
        self._again_s = again_s
        self._not_before_s: dict[str, float] = {}
        self._images_first = False
        self._idle_since_s: float | None = None

    def first_grant(self) -> Held:
        max_bytes = {model: share.max_bytes for model, share in self._shares.items()}
        return Held(self.total_bytes - sum(max_bytes.values()), max_bytes)

    def next_grant(self, held: Held, now: float, *, images_under_way: bool, images_lack_room: bool) -> Grant | None:
        """Return the next change, None if there is none now. A grant may take a while to be carried out."""
        self._notice(now, under_way=images_under_way, lack_room=images_lack_room)
        images_first = self._images_first
        targets = {model: share.min_bytes if images_first else share.max_bytes for model, share in self._shares.items()}
        for model, target_bytes in targets.items():
            if held.models_bytes[model] > target_bytes:
                return Grant(target_bytes, model)
        promised_bytes = sum(max(target, held.models_bytes[model]) for model, target in targets.items())
        for_images = max(0, self.total_bytes - promised_bytes)
        if held.images_bytes != for_images:
            return Grant(for_images)
        free_bytes = self.total_bytes - held.images_bytes - sum(held.models_bytes.values())
        for model, target_bytes in targets.items():
            missing_bytes = target_bytes - held.models_bytes[model]
            if 0 < missing_bytes <= free_bytes and now >= self._not_before_s.get(model, now):
                return Grant(target_bytes, model)
        return None

    def cannot_shrink(self, model: str, min_bytes: int) -> None:
        share = self._shares[model]
        self._shares[model] = ModelShare(model, share.max_bytes, min(share.max_bytes, min_bytes))

    def cannot_grow(self, model: str, now: float) -> None:
        """Offer memory again later: the machine lacks what the budget leaves for the model."""
        self._not_before_s[model] = now + self._again_s

    def _notice(self, now: float, *, under_way: bool, lack_room: bool) -> None:
        if lack_room:
            self._images_first = True
        if under_way:
            self._idle_since_s = None
            return
        if self._idle_since_s is None:
            self._idle_since_s = now
        if now - self._idle_since_s >= self._give_back_s:
            self._images_first = False


def next_step_s(ended_s: float, took_s: float, *, images_under_way: bool, share: float = 0.1) -> float:
    """Return when a model may take its next step after one that ended at `ended_s` and took `took_s` (seconds).

    While images are under way a model computes for `share` of the time.
    """
    return ended_s + took_s * (1.0 / share - 1.0) if images_under_way else ended_s
