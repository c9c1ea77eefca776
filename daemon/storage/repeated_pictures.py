"""The pictures that each source sent last: one that comes again for another place or board shows a frozen camera."""

from collections import OrderedDict
from dataclasses import dataclass, field

from daemon.config.settings import Guards
from daemon.records import Image

#: No guard of acceptance, as in a program that takes no pictures.
OFF = Guards(repeated_picture=0, retest_after=0, may_repeat=["*"])
#: Pictures of all sources; beyond it the source goes that was silent for longest.
_MAX_PICTURES = 200_000


@dataclass(slots=True)
class _Source:
    """`pictures` has by payload its last place, the number of the image there, and of the last one elsewhere."""

    accepted: int = 0
    pictures: OrderedDict[int, tuple[int, int, int]] = field(default_factory=OrderedDict[int, tuple[int, int, int]])


class RepeatedPictures:
    """Knows the pictures since the daemon's start, for the writer's thread.

    An image whose transaction fails stays known. It comes again for the same place, and so is no repetition.
    """

    def __init__(self, guards: Guards) -> None:
        self.guards = guards
        self._window = int(guards.repeated_picture)
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._count = 0

    def note(self, image: Image) -> bool:
        """Note an image that is accepted; True if its picture came before, for another position or board."""
        if not self._window or self.guards.may_send_again(image.source):
            return False
        source = self._sources.setdefault(image.source, _Source())
        self._sources.move_to_end(image.source)
        source.accepted += 1
        number, pictures = source.accepted, source.pictures
        payload = hash((image.sha256, image.pixels.shape))
        place = hash((image.board.type, image.board.serial, image.component, image.designator))
        before, last, elsewhere = pictures.pop(payload, (place, 0, 0))
        self._count += not last
        if last and before != place:
            elsewhere = last
        pictures[payload] = place, number, elsewhere
        while next(iter(pictures.values()))[1] <= number - self._window:
            pictures.popitem(last=False)
            self._count -= 1
        while self._count > _MAX_PICTURES and len(self._sources) > 1:
            self._count -= len(self._sources.popitem(last=False)[1].pictures)
        return elsewhere > 0 and number - elsewhere <= self._window
