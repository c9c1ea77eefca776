"""Hostile publishers and consumers, each kind a function that runs for a time: `python -m tests.stress.hostile`.

In processes of their own and with the lowest priority, so that they take processor time from the daemon as little as
possible.
"""

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from daemon.wire.messages import MAGIC, encode
from tests.stress.line import OPEN_BOARD_TYPE, make_jpegs
from tests.stress.raw import GREETING, RawPeer, frame, frame_head
from tools.terminal.console import quiet_start

#: Unanswered messages of one flooding connection.
_WINDOW = 256
_LOWEST_PRIORITY = 19
_ALL_RESULTS = encode({"type": "results_since", "seq": 0, "limit": 1000})
_STOPS_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class AttackTarget:
    """The line that is attacked, and until when (monotonic). `seed` makes names that were never used before."""

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
    """Return a connection that drops nothing, however slow its other end is."""
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.sndhwm = dealer.rcvhwm = 0
    dealer.connect(endpoint)
    return dealer


def _pump(
    target: AttackTarget, connections: int, message: Callable[[int], Sequence[bytes]], window: int = _WINDOW
) -> Counts:
    """Keep `window` messages unanswered on each connection, whatever the daemon answers."""
    counts: Counts = Counter()
    with zmq.Context() as context:
        poller = zmq.Poller()
        dealers = [connected(context, target.intake) for _ in range(connections)]
        for dealer in dealers:
            poller.register(dealer, zmq.POLLIN)
            for _ in range(window):
                dealer.send_multipart(message(counts["sent"]), copy=False)
                counts["sent"] += 1
        while not target.time_is_up:
            for dealer, _ in poller.poll(100):
                while dealer.poll(0) and not target.time_is_up:
                    counts[json.loads(dealer.recv_multipart()[-1])["type"]] += 1
                    dealer.send_multipart(message(counts["sent"]), copy=False)
                    counts["sent"] += 1
        for dealer in dealers:
            dealer.close(linger=0)
    return counts


def images(target: AttackTarget, size_bytes: int = 100_000, window: int = _WINDOW, connections: int = 1) -> Counts:
    """Send valid images, each new, as fast as they are answered."""
    payloads = make_jpegs(4, size_bytes, target.seed)
    source = f"flood-{target.seed}"

    def message(number: int) -> Sequence[bytes]:
        return MAGIC, _inspect(f"{source}/{number}", source), payloads[number % len(payloads)]

    return _pump(target, connections, message, window)


def junk(target: AttackTarget) -> Counts:
    """Send headers that are not JSON, objects with wrong fields, wrong frames."""
    dice = random.Random(target.seed)
    heads = [dice.randbytes(60), b"{" * 2000, encode({"type": "inspect"}), b"", encode({"type": "x" * 60_000}), b"[]"]
    return _pump(target, 1, lambda number: (MAGIC if number % 7 else b"junk", heads[number % len(heads)]), 1000)


def duplicates(target: AttackTarget) -> Counts:
    """Send one image over and over."""
    payload = make_jpegs(1, 100_000, target.seed)[0]
    source = f"again-{target.seed}"
    header = _inspect(f"{source}/1", source)
    return _pump(target, 4, lambda _: (MAGIC, header, payload))


def catch_ups(target: AttackTarget) -> Counts:
    """Ask for all results on many connections."""
    return _pump(target, 8, lambda _: (MAGIC, _ALL_RESULTS))


def new_names(target: AttackTarget) -> Counts:
    """Invent a source, a board and a serial for each message, and open a connection for each hundred."""
    payload = make_jpegs(1, 8_000, target.seed)[0]
    counts: Counts = Counter()
    with zmq.Context() as context:
        while not target.time_is_up:
            with connected(context, target.intake) as dealer:
                for _ in range(100):
                    source = f"name-{target.seed}-{counts['sent']}"
                    dealer.send_multipart((MAGIC, _inspect("1", source), payload))
                    counts["sent"] += 1
                for _ in range(100):
                    if target.time_is_up or not dealer.poll(2000):
                        break
                    counts[json.loads(dealer.recv_multipart()[-1])["type"]] += 1
    return counts


def deaf(target: AttackTarget) -> Counts:
    """Send questions and images, and read no answer."""
    payload = make_jpegs(1, 20_000, target.seed)[0]
    source = f"deaf-{target.seed}"
    counts: Counts = Counter()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvhwm = 1
        dealer.sndtimeo = 100
        dealer.connect(target.intake)
        while not target.time_is_up:
            number = counts["sent"]
            image = (MAGIC, _inspect(f"{source}/{number}", source), payload)
            try:
                dealer.send_multipart((MAGIC, _ALL_RESULTS) if number % 2 else image)
                counts["sent"] += 1
            except zmq.Again:
                counts["held_back"] += 1
    return counts


def deaf_subscriber(target: AttackTarget) -> Counts:
    """Subscribe to everything and read nothing."""
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


def _with_raw_peers(target: AttackTarget, attack: Callable[[RawPeer], Counts]) -> Counts:
    """Carry out `attack` on one connection after the other."""
    counts: Counts = Counter()
    while not target.time_is_up:
        try:
            with RawPeer(target.intake) as peer:
                counts += attack(peer)
        except OSError:
            counts["refused"] += 1
            time.sleep(0.05)
    return counts


def vanishing(target: AttackTarget) -> Counts:
    """Connect, send a part of a greeting or a message, and vanish."""
    dice = random.Random(target.seed)
    whole = frame(MAGIC, more=True) + frame(_inspect("v", f"gone-{target.seed}"), more=True)
    whole += frame(dice.randbytes(40_000), more=False)

    def attack(peer: RawPeer) -> Counts:
        if dice.random() < 0.3:
            peer.send(GREETING[: dice.randint(1, 64)])
        else:
            peer.greet().send(whole[: dice.randint(1, len(whole))])
        return Counter(gone=1)

    return _with_raw_peers(target, attack)


def giants(target: AttackTarget) -> Counts:
    """Announce enormous frames, send messages of a thousand parts, and messages that never end."""
    part = frame(bytes(1000), more=True)
    kinds = itertools.cycle(("enormous", "many parts", "endless"))

    def attack(peer: RawPeer) -> Counts:
        peer.greet()
        counts = Counter(tried=1)
        kind = next(kinds)
        if kind == "enormous":
            peer.send(frame_head(2**40, more=False) + bytes(100))
        elif kind == "many parts":
            peer.send(part * 1000 + frame(b"end", more=False))
        else:
            peer.socket.settimeout(1.0)
            stop_s = min(target.until_s, time.monotonic() + 1.0)
            while time.monotonic() < stop_s and peer.send(part * 1000):
                counts["megabytes"] += 1
        counts["cut"] = int(peer.is_cut(0.2))
        return counts

    return _with_raw_peers(target, attack)


def half_open(target: AttackTarget) -> Counts:
    """Open hundreds of connections that stop somewhere in the handshake or in a message, and stay."""
    dice = random.Random(target.seed)
    counts: Counts = Counter()
    peers: list[RawPeer] = []
    while not target.time_is_up:
        if len(peers) < 500:
            try:
                peer = RawPeer(target.intake)
            except OSError:
                counts["refused"] += 1
                time.sleep(0.1)
                continue
            peers.append(peer)
            counts["opened"] += 1
            choice = dice.randrange(4)
            if choice == 0:
                peer.send(GREETING[: dice.randint(1, 63)])
            elif choice == 1:
                peer.send(dice.randbytes(100))
            elif choice == 2:
                peer.greet().send(frame(MAGIC, more=True) + frame_head(50_000_000, more=False) + bytes(1000))
        else:
            time.sleep(0.5)
            cut = [peer for peer in peers if peer.is_cut()]
            counts["cut"] += len(cut)
            for peer in cut:
                peer.close()
                peers.remove(peer)
    for peer in peers:
        peer.close()
    return counts


KINDS: Mapping[str, Callable[[AttackTarget], Counts]] = {
    "images": images,
    "large-images": partial(images, size_bytes=5_000_000, window=32),
    "many-connections": partial(images, size_bytes=20_000, window=64, connections=100),
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
    """One kind of attack, for `seconds` in a process of its own."""

    def __init__(self, kind: str, intake: str, results: str, seconds: float, seed: int) -> None:
        self.kind = kind
        self._seconds = seconds
        command = [sys.executable, "-m", "tests.stress.hostile", kind, intake, results, str(seconds), str(seed)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=quiet_start())

    def finish(self) -> dict[str, int]:
        """Wait for its end and return its counts; `failed` is 1 where it died."""
        try:
            text, _ = self._process.communicate(timeout=self._seconds + _STOPS_WITHIN_S)
            return json.loads(text) if self._process.returncode == 0 else {"failed": 1}
        except (subprocess.TimeoutExpired, json.JSONDecodeError):
            self.kill()
            return {"failed": 1}

    def kill(self) -> None:
        """End it by SIGKILL, in the middle of its work."""
        self._process.kill()
        self._process.communicate()


def main() -> None:
    kind, intake, results, seconds, seed = sys.argv[1:]
    os.nice(_LOWEST_PRIORITY)
    target = AttackTarget(intake, results, time.monotonic() + float(seconds), int(seed))
    print(json.dumps(KINDS[kind](target)))


if __name__ == "__main__":
    main()
