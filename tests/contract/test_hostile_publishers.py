"""A real daemon among hostile processes: honest images are accepted and judged, and nothing is left behind."""

import time
from pathlib import Path

import psutil
import pytest

from tests.contract.client import Line
from tests.stress.hostile import KINDS, Attack
from tests.stress.line import assert_judged, make_jpegs
from tests.stress.soak import StreamConsumer
from tests.stress.steady import SteadyPublisher

RULES = """\
boards:
  stress: {time_limit: 10m, components: {P: 3, R: 1}}
  open: {extras: allow, components: {P: 1}}
classifiers:
  "*": {expert: R0402, pass: [ok, odd, bad], review_below: 0.0}
"""
LIMITS = {"backlog_images": 1000, "source_share": 0.4, "in_memory": "64MB"}


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, experts_folder: Path) -> Line:
    return Line(tmp_path_factory.mktemp("hostile") / "line", experts_folder, RULES, limits=LIMITS)


def handles_in_use(daemon: psutil.Process) -> int:
    """Count all but those of the database, whose readers are kept for later, five at most."""
    database = [file for file in daemon.open_files() if "inspection.db" in file.path]
    assert len(database) <= 2 * (1 + 5 + 3)
    return daemon.num_fds() - len(database)


@pytest.mark.promise(
    "Overload and hostile publishers",
    "Honest images are accepted and judged whatever hostile processes do, even across a kill of the daemon",
)
def test_honest_images_are_accepted_and_judged_whatever_hostile_processes_do(line: Line) -> None:
    with line.service() as service:
        assert service.process is not None
        daemon = psutil.Process(service.process.pid)
        honest = SteadyPublisher(line.intake, "honest", make_jpegs(4, 10_000), 20)
        consumer = StreamConsumer(line.results, line.intake)
        honest.start()
        consumer.start()
        line.wait(lambda: consumer.last_seq >= 20)  # the database's readers are open
        handles, threads = handles_in_use(daemon), daemon.num_threads()
        kinds = [kind for kind in KINDS if kind not in ("large-images", "many-connections")]
        attacks = [Attack(kind, line.intake, line.results, 1.5, seed) for seed, kind in enumerate(kinds)]
        time.sleep(1.5)
        for attack in attacks[::2]:
            attack.kill()  # in the middle of a message
        counts_by_kind = {attack.kind: attack.finish() for attack in attacks[1::2]}
        assert not [kind for kind, counts in counts_by_kind.items() if "failed" in counts]
        account = honest.stop()
        assert account.exit_status == 0, account.as_dict()
        line.idle()
        line.wait(lambda: handles_in_use(daemon) <= handles + 4 and daemon.num_threads() <= threads + 2)
        consumer.stop()
        assert consumer.lost == 0
        assert consumer.last_seq > account.sent
        assert service.stop() == 0
    assert_judged(line, {"honest": account.sent})
    assert not [text for text in line.log().splitlines() if "failed" in text and "image_quarantined" not in text]
