"""The tools that judge the long runs: a trend and how sure it is, an audit of the results, mutations by seed."""

import random
from pathlib import Path

from tests.contract.client import Line
from tests.stress.audit import audit
from tests.stress.growth import slope
from tests.stress.line import make_jpegs
from tests.stress.mutate import Mutator, Seed
from tests.stress.steady import SteadyPublisher

RULES = """\
boards:
  stress: {time_limit: 10m, components: {P: 3, R: 1}}
classifiers:
  "*": {expert: R0402, pass: [ok, odd, bad], review_below: 0.0}
"""


def test_a_leak_is_seen_through_noise_and_noise_alone_is_flat() -> None:
    dice = random.Random(3)
    at_s = [float(second) for second in range(0, 3600, 5)]
    noise = [600 + dice.gauss(0, 20) for _ in at_s]
    leak = [value + 60 * second / 3600 for value, second in zip(noise, at_s, strict=True)]
    assert slope(at_s, noise).is_flat(2.0)
    growth = slope(at_s, leak)
    assert not growth.is_flat(2.0)
    assert growth.lowest < 60 < growth.highest
    assert slope(at_s, [7.0] * len(at_s)).highest == 0.0
    assert slope(at_s[:2], [1.0, 2.0]).highest == float("inf")


def test_the_same_seed_sends_the_same_messages() -> None:
    valid = [
        Seed({"type": "inspect", "id": "i", "board": {"type": "b"}}, b"\xff\xd8payload"),
        Seed({"type": "hello"}, None),
    ]

    def messages(seed: int) -> list[list[bytes]]:
        mutator = Mutator(seed, valid)
        return [mutator.next() for _ in range(500)]

    assert messages(4) == messages(4)
    assert messages(4) != messages(5)


def test_an_audit_holds_and_sees_images_that_were_lost(tmp_path: Path, experts_folder: Path) -> None:
    line = Line(tmp_path / "line", experts_folder, RULES)
    with line.service():
        steady = SteadyPublisher(line.intake, "steady", make_jpegs(2, 5000), 40)
        steady.start()
        line.wait(lambda: steady.tally.accepted >= 20)
        steady.stop()
        line.idle()
        waits_s = steady.take_waits_s()
        assert len(waits_s) == steady.tally.sent == steady.tally.accepted
        assert all(wait_s > 0 for wait_s in waits_s)
    database = line.folder / "inspection.db"
    result = audit(database, [("steady", steady.tally.sent)])
    assert result.holds, result
    assert result.accepted == steady.tally.sent
    result = audit(database, [("steady", steady.tally.sent + 3)])
    assert result.lost == 3
    assert not result.holds
