"""Seeded mutations of valid messages: frames that a broken or hostile publisher might send."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Frames = list[bytes]

_MAGICS = (b"CS2", b"CS", b"cs1", b"", b"CS10", b"XYZ", b"CS1\0", b"CS999999999999999999999")
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10.0, 1e308, 0.5, "", " ", "a" * 129, "a" * 128,
    "\x00", "\u202e", "\ud800", "é" * 128, "../../etc/passwd", "'; DROP TABLE inspections; --", "%s%n", [], {}, [[]],
    [1, 2, 3], {"type": "x"}, "NaN", "2026-11-21T09:28:11Z", "2026-02-30T25:61:61Z", "0" * 64,
)  # fmt: skip
_RAW_VALUES = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1" * 5000, b'"\\ud800"', b'"\\u0000"', b"[" * 900)


@dataclass(frozen=True, slots=True)
class Seed:
    """A valid message: header and payload."""

    header: dict[str, Any]
    payload: bytes | None


class Mutator:
    """Makes the same messages from the same seed. Sizes stay below the limits at which a connection is cut."""

    def __init__(self, seed: int, valid: Sequence[Seed]) -> None:
        self._dice = random.Random(seed)
        self._valid = valid
        self._ways: tuple[Callable[[Seed], Frames], ...] = (
            self._as_it_is, self._another_value, self._another_value, self._raw_value, self._without_a_field,
            self._twice_a_field, self._flipped_header, self._cut_header, self._spliced_headers, self._flipped_payload,
            self._cut_payload, self._another_magic, self._other_frames, self._noise, self._deep, self._huge_header,
        )  # fmt: skip

    def next(self) -> Frames:
        """One message, as frames after the envelope."""
        return self._dice.choice(self._ways)(self._dice.choice(self._valid))

    def _frames(self, header: bytes, payload: bytes | None) -> Frames:
        return [b"CS1", header, *(() if payload is None else (payload,))]

    def _as_it_is(self, seed: Seed) -> Frames:
        return self._frames(_text(seed.header), seed.payload)

    def _another_value(self, seed: Seed) -> Frames:
        header = json.loads(json.dumps(seed.header))
        fields = header
        name = self._dice.choice(list(fields))
        if isinstance(fields[name], dict) and fields[name] and self._dice.random() < 0.7:
            fields = fields[name]
            name = self._dice.choice(list(fields))
        fields[name] = self._dice.choice(_VALUES)
        return self._frames(_text(header), seed.payload)

    def _raw_value(self, seed: Seed) -> Frames:
        name = self._dice.choice(list(seed.header))
        marker = b'"\x01marker"'
        text = _text({**seed.header, name: "\x01marker"}).replace(_text("\x01marker"), marker)
        return self._frames(text.replace(marker, self._dice.choice(_RAW_VALUES)), seed.payload)

    def _without_a_field(self, seed: Seed) -> Frames:
        name = self._dice.choice(list(seed.header))
        return self._frames(_text({key: value for key, value in seed.header.items() if key != name}), seed.payload)

    def _twice_a_field(self, seed: Seed) -> Frames:
        name = self._dice.choice(list(seed.header))
        again = _text({name: self._dice.choice(_VALUES)})[1:-1]
        return self._frames(_text(seed.header)[:-1] + b"," + again + b"}", seed.payload)

    def _flipped_header(self, seed: Seed) -> Frames:
        return self._frames(self._flip(_text(seed.header)), seed.payload)

    def _cut_header(self, seed: Seed) -> Frames:
        text = _text(seed.header)
        return self._frames(text[: self._dice.randrange(len(text))], seed.payload)

    def _spliced_headers(self, seed: Seed) -> Frames:
        first, second = _text(seed.header), _text(self._dice.choice(self._valid).header)
        cut, begin = self._dice.randrange(len(first)), self._dice.randrange(len(second))
        return self._frames(first[:cut] + second[begin:], seed.payload)

    def _flipped_payload(self, seed: Seed) -> Frames:
        return self._frames(self._renamed(seed), self._flip(seed.payload or b"\0"))

    def _cut_payload(self, seed: Seed) -> Frames:
        payload = seed.payload or b"\0"
        return self._frames(self._renamed(seed), payload[: self._dice.randrange(len(payload) + 1)])

    def _another_magic(self, seed: Seed) -> Frames:
        return [self._dice.choice(_MAGICS), *self._as_it_is(seed)[1:]]

    def _other_frames(self, seed: Seed) -> Frames:
        frames = self._as_it_is(seed)
        for _ in range(self._dice.randint(1, 4)):
            place = self._dice.randrange(len(frames) + 1)
            frames.insert(place, self._dice.choice([b"", b"\0", b"CS1", b"\0" * 5, self._dice.randbytes(4), *frames]))
        while len(frames) > 1 and self._dice.random() < 0.3:
            del frames[self._dice.randrange(len(frames))]
        return frames

    def _noise(self, _seed: Seed) -> Frames:
        return [self._dice.randbytes(self._dice.choice((0, 1, 4, 5, 60, 700))) for _ in range(self._dice.randint(1, 6))]

    def _deep(self, seed: Seed) -> Frames:
        depth = self._dice.choice((10, 900, 30_000))
        opening, closing = self._dice.choice(((b"[", b"]"), (b'{"a":', b"}")))
        depth = min(depth, 60_000 // (len(opening) + 1))
        nested = opening * depth + b"1" + closing * depth
        return self._frames(_text(seed.header)[:-1] + b',"more":' + nested + b"}", seed.payload)

    def _huge_header(self, seed: Seed) -> Frames:
        size = self._dice.choice((60_000, 65_536, 70_000, 500_000))
        return self._frames(_text({**seed.header, "more": "x" * size}), None)

    def _flip(self, data: bytes) -> bytes:
        flipped = bytearray(data)
        for _ in range(self._dice.randint(1, 8)):
            flipped[self._dice.randrange(len(flipped))] ^= 1 << self._dice.randrange(8)
        return bytes(flipped)

    def _renamed(self, seed: Seed) -> bytes:
        """Return the header with a new id, so that the payload is examined: a known image's is not."""
        return _text({**seed.header, "id": f"fuzz-{self._dice.getrandbits(48):x}"})


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("utf-8", "surrogatepass")
