"""Hostile publishers and consumers, each kind a function that runs until told: `python -m tests.stress.hostile`.

In processes of their own and with the lowest priority: what they take from the processor is not the daemon's doing.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from daemon.wire.frames import MAGIC, encode
from tests.stress.line import OPEN_BOARD_TYPE, make_jpegs
from tests.stress.raw import GREETING, RawPeer, frame, frame_head
from tools.cli.console import quiet_start

#: Unanswered messages of one flooding connection.
_WINDOW = 256
_LOWEST_PRIORITY = 19
_STOPS_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Target:
    """The line that is attacked, and until when (monotonic). `seed` makes names that nobody had."""

    intake: str
    results: str
    until_s: float
    seed: int

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() >= self.until_s


Counts = Counter[str]


def _inspect(image_id: str, source: str, **fields: Any) -> bytes:
    board = {"type": OPEN_BOARD_TYPE, "serial": source}
    return encode({"type": "inspect", "id": image_id, "source": source, "board": board, "component": "P", **fields})


def connected(context: "zmq.Context[Any]", endpoint: str) -> "zmq.Socket[bytes]":
    """A connection that drops nothing, however slow its other end is."""
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.sndhwm = dealer.rcvhwm = 0
    dealer.connect(endpoint)
    return dealer


def _pump(target: Target, connections: int, message: Callable[[int], Sequence[bytes]], window: int = _WINDOW) -> Counts:
    """Keep `window` messages unanswered on each connection, whatever the daemon's answers say."""
    told: Counts = Counter()
    with zmq.Context() as context:
        poller = zmq.Poller()
        dealers = [connected(context, target.intake) for _ in range(connections)]
        for dealer in dealers:
            poller.register(dealer, zmq.POLLIN)
        number = 0
        for dealer in dealers:
            for _ in range(window):
                dealer.send_multipart(message(number), copy=False)
                number += 1
        while not target.time_is_up:
            for dealer, _ in poller.poll(100):
                while dealer.poll(0) and not target.time_is_up:
                    told[json.loads(dealer.recv_multipart()[-1])["type"]] += 1
                    dealer.send_multipart(message(number), copy=False)
                    number += 1
        for dealer in dealers:
            dealer.close(linger=0)
    told["sent"] = number
    return told


def images(target: Target, size_bytes: int = 100_000, window: int = _WINDOW, connections: int = 1) -> Counts:
    """Valid images, each new, as fast as they are answered."""
    payloads = make_jpegs(4, size_bytes, target.seed)
    source = f"flood-{target.seed}"

    def message(number: int) -> Sequence[bytes]:
        return MAGIC, _inspect(f"{source}/{number}", source), payloads[number % len(payloads)]

    return _pump(target, connections, message, window)


def large_images(target: Target) -> Counts:
    """Valid images of 5 MB."""
    return images(target, 5_000_000, window=32)


def many_connections(target: Target) -> Counts:
    """A hundred connections with a full window each."""
    return images(target, 20_000, window=64, connections=100)


def junk(target: Target) -> Counts:
    """Headers that are no JSON, objects of wrong fields, wrong frames."""
    dice = random.Random(target.seed)
    heads = [dice.randbytes(60), b"{" * 2000, encode({"type": "inspect"}), b"", encode({"type": "x" * 60_000}), b"[]"]
    return _pump(target, 1, lambda number: (MAGIC if number % 7 else b"junk", heads[number % len(heads)]), 1000)


def duplicates(target: Target) -> Counts:
    """One image over and over."""
    payload = make_jpegs(1, 100_000, target.seed)[0]
    source = f"again-{target.seed}"
    header = _inspect(f"{source}/1", source)
    return _pump(target, 4, lambda _: (MAGIC, header, payload))


def catch_ups(target: Target) -> Counts:
    """Everybody asks for everything."""
    return _pump(target, 8, lambda _: (MAGIC, encode({"type": "results_since", "seq": 0, "limit": 1000})))


def new_names(target: Target) -> Counts:
    """A source, a board and a serial that nobody had in each message, and a new connection in each hundred."""
    payload = make_jpegs(1, 8_000, target.seed)[0]
    told: Counts = Counter()
    with zmq.Context() as context:
        while not target.time_is_up:
            with connected(context, target.intake) as dealer:
                for _ in range(100):
                    source = f"name-{target.seed}-{told['sent']}"
                    dealer.send_multipart((MAGIC, _inspect("1", source), payload))
                    told["sent"] += 1
                for _ in range(100):
                    if target.time_is_up or not dealer.poll(2000):
                        break
                    told[json.loads(dealer.recv_multipart()[-1])["type"]] += 1
    return told


def deaf(target: Target) -> Counts:
    """Sends questions and images, and reads no answer."""
    payload = make_jpegs(1, 20_000, target.seed)[0]
    source = f"deaf-{target.seed}"
    told: Counts = Counter()
    question = encode({"type": "results_since", "seq": 0, "limit": 1000})
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvhwm = 1
        dealer.sndtimeo = 100
        dealer.connect(target.intake)
        while not target.time_is_up:
            number = told["sent"]
            image = (MAGIC, _inspect(f"{source}/{number}", source), payload)
            try:
                dealer.send_multipart((MAGIC, question) if number % 2 else image)
                told["sent"] += 1
            except zmq.Again:
                told["held_back"] += 1
    return told


def deaf_subscriber(target: Target) -> Counts:
    """Subscribes to everything and reads nothing."""
    with zmq.Context() as context:
        subscribers: list[zmq.Socket[bytes]] = []
        for _ in range(10):
            subscriber: zmq.Socket[bytes] = context.socket(zmq.SUB)
            subscriber.linger = 0
            subscriber.rcvhwm = 1
            subscriber.subscribe(b"")
            subscriber.connect(target.results)
            subscribers.append(subscriber)
        time.sleep(max(0.0, target.until_s - time.monotonic()))
        for subscriber in subscribers:
            subscriber.close(linger=0)
    return Counter(subscribers=10)


def vanishing(target: Target) -> Counts:
    """Connect, say a part of something, and are gone."""
    dice = random.Random(target.seed)
    told: Counts = Counter()
    payload = dice.randbytes(40_000)
    whole = frame(MAGIC, more=True) + frame(_inspect("v", f"gone-{target.seed}"), more=True)
    whole += frame(payload, more=False)
    while not target.time_is_up:
        try:
            with RawPeer(target.intake) as peer:
                said = GREETING[: dice.randint(0, 64)] if dice.random() < 0.3 else b""
                if not said:
                    peer.greet()
                    said = whole[: dice.randint(1, len(whole))]
                peer.send(said)
                told["gone"] += 1
        except OSError:
            told["refused"] += 1
            time.sleep(0.05)
    return told


def half_open(target: Target) -> Counts:
    """Hundreds of connections that stop somewhere in the handshake or in a message, and stay."""
    dice = random.Random(target.seed)
    told: Counts = Counter()
    peers: list[RawPeer] = []
    while not target.time_is_up:
        if len(peers) < 500:
            try:
                peer = RawPeer(target.intake)
            except OSError:
                told["refused"] += 1
                time.sleep(0.1)
                continue
            peers.append(peer)
            told["opened"] += 1
            choice = dice.randrange(4)
            if choice == 0:
                peer.send(GREETING[: dice.randint(1, 63)])
            elif choice == 1:
                peer.send(dice.randbytes(100))
            elif choice == 2:
                peer.greet().send(frame(MAGIC, more=True) + frame_head(50_000_000, more=False) + bytes(1000))
        else:
            time.sleep(0.5)
            standing = [peer for peer in peers if not peer.is_cut()]
            told["cut"] += len(peers) - len(standing)
            for peer in set(peers) - set(standing):
                peer.close()
            peers = standing
    for peer in peers:
        peer.close()
    return told


def giants(target: Target) -> Counts:
    """Frames that say they are enormous, messages of a thousand parts, and messages that never end."""
    told: Counts = Counter()
    part = frame(bytes(1000), more=True)
    while not target.time_is_up:
        try:
            with RawPeer(target.intake) as peer:
                peer.greet()
                kind = told["tried"] % 3
                told["tried"] += 1
                if kind == 0:
                    peer.send(frame_head(2**40, more=False) + bytes(100))
                elif kind == 1:
                    peer.send(part * 1000 + frame(b"end", more=False))
                else:
                    peer.socket.settimeout(1.0)
                    stop_s = min(target.until_s, time.monotonic() + 1.0)
                    while time.monotonic() < stop_s and peer.send(part * 1000):
                        told["megabytes"] += 1
                told["cut"] += peer.is_cut(0.2)
        except OSError:
            told["refused"] += 1
            time.sleep(0.05)
    return told


KINDS: Mapping[str, Callable[[Target], Counts]] = {
    "images": images,
    "large-images": large_images,
    "many-connections": many_connections,
    "junk": junk,
    "duplicates": duplicates,
    "catch-ups": catch_ups,
    "new-names": new_names,
    "deaf": deaf,
    "deaf-subscriber": deaf_subscriber,
    "vanishing": vanishing,
    "half-open": half_open,
    "giants": giants,
}


class Attack:
    """One kind as a process of its own for `seconds`; its counts at the end."""

    def __init__(self, kind: str, intake: str, results: str, seconds: float, seed: int) -> None:
        self.kind = kind
        self.seconds = seconds
        command = [sys.executable, "-m", "tests.stress.hostile", kind, intake, results, str(seconds), str(seed)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=quiet_start())

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def finish(self) -> dict[str, int]:
        """Wait for its end; what it counted, nothing where it died."""
        try:
            said, _ = self._process.communicate(timeout=self.seconds + _STOPS_WITHIN_S)
            return json.loads(said) if self._process.returncode == 0 else {"failed": 1}
        except (subprocess.TimeoutExpired, json.JSONDecodeError):
            self.kill()
            return {"failed": 1}

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it does."""
        self._process.kill()
        self._process.communicate()


def main() -> None:
    kind, intake, results, seconds, seed = sys.argv[1:]
    os.nice(_LOWEST_PRIORITY)
    target = Target(intake, results, time.monotonic() + float(seconds), int(seed))
    print(json.dumps(KINDS[kind](target)))


if __name__ == "__main__":
    main()
