"""`coserve db backup|check|prune`, on a line at rest and on one that runs."""

import json
import shutil
import time
from functools import partial
from pathlib import Path

import pytest
import yaml

from coserve_client import Publisher
from daemon.config.settings import load_config
from daemon.storage.claims import claim
from daemon.storage.database.upkeep import check_database
from daemon.wire.control import ask
from tests.lines import a_jpeg, a_line
from tests.simulated import a_service
from tests.sql import sql
from tests.tools.run_commands import start_coserve

db = partial(start_coserve, "db")
#: An image that waits for a journal segment which is gone.
WAITING = (
    'INSERT INTO pending (inspection_id, task, segment, "offset", length, encoding)'
    " VALUES (3, 'keep', 77, 16, 100, 'image')"
)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory, experts_folder: Path) -> Path:
    """A line that ran once: twelve images judged and kept, three boards closed."""
    folder = tmp_path_factory.mktemp("judged") / "line"
    config = a_line(folder, experts_folder, retention={"keep": ["pass", "fail", "review", "unknown"]})
    with a_service(config, folder / "daemon.log"):
        with Publisher(f"ipc://{folder}/run/intake.sock", "camera") as publisher:
            for n in range(12):
                board = {"type": "open-board", "serial": f"S{n % 3}"}
                publisher.send(f"i{n}", a_jpeg(n), board=board, component="R0402")
            assert publisher.finish(60.0).accepted == 12
        while sql(folder, "SELECT 1 FROM pending"):
            time.sleep(0.1)
        # While the line runs: the same answers.
        assert json.loads(db("check", "--config", config, "--json").stdout)["problems"] == []
        copy = folder / "copy.db"
        assert db("backup", copy, "--config", config).returncode == 0
        assert sql(copy, "SELECT count(*) FROM inspections") == [(12,)]
        assert not copy.with_name("copy.db-wal").exists()
        assert json.loads(db("prune", "--config", config, "--json").stdout)["images"] == 0
        assert ask(f"ipc://{folder}/run/control.sock", "prune", begin=False)["pruning"] is False
    return folder


@pytest.fixture
def line(judged: Path, tmp_path: Path) -> Path:
    """A copy of that line, at rest."""
    shutil.copytree(judged, tmp_path / "line", ignore=shutil.ignore_patterns("run", "experts"))
    (tmp_path / "line" / "experts").symlink_to(judged / "experts")
    return tmp_path / "line"


def problems(line: Path) -> str:
    damage = check_database(f"sqlite:///{line}/inspection.db", line / "images", line / "journal")
    assert damage
    return "\n".join(damage)


def settings(line: Path, **retention: object) -> None:
    path = line / "coserve.yaml"
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**config, "retention": retention}))


def test_a_missing_and_a_cut_image_are_named(line: Path) -> None:
    first, second = sorted((line / "images").rglob("*.jpg"))[:2]
    first.unlink()
    second.write_bytes(b"cut")
    damage = problems(line)
    assert "2 kept images" in damage
    assert first.name in damage
    assert second.name in damage
    done = db("check", "--config", line / "coserve.yaml")
    assert (done.returncode, done.stdout.splitlines()[:-1]) == (1, damage.splitlines())


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (["DELETE FROM stages WHERE inspection_id = 5", "DELETE FROM inspections WHERE inspection_id = 5"],
         "1 are missing; gaps:"),
        (["DELETE FROM boards WHERE serial = 'S1'"], "of inspections names a row of boards that is not there"),
        ([WAITING], "segment-00000077.journal is missing: 1 images wait in it"),
    ],
)  # fmt: skip
def test_a_lost_result_and_a_row_without_what_it_names_are_seen(line: Path, harm: list[str], message: str) -> None:
    sql(line, "PRAGMA foreign_keys = OFF", *harm)
    assert message in problems(line)


@pytest.mark.promise(
    "A full disk, and years of results", "`coserve db check` detects a damaged page, a lost result and a missing image"
)
def test_a_damaged_page_is_seen(line: Path) -> None:
    path = line / "inspection.db"
    ((root,),) = sql(path, "SELECT rootpage FROM sqlite_master WHERE name = 'ix_inspections_board_id_surplus'")
    with path.open("r+b") as file:
        file.seek((int(str(root)) - 1) * 4096)
        file.write(b"\xff" * 100)
    assert "damaged" in problems(line) or "malformed" in problems(line)


def test_pruning_a_line_at_rest_frees_files_and_pages(line: Path) -> None:
    settings(line, keep=["fail"], images_bytes="1B")
    pruned = db("prune", "--config", line / "coserve.yaml", "--json")
    assert json.loads(pruned.stdout)["images"] == 12
    assert list((line / "images").rglob("*.*g")) == []
    assert sql(line, "SELECT count(*), count(image_path) FROM inspections") == [(12, 0)]
    sql(
        line,
        "UPDATE boards SET completed_at = '2020'",
        "UPDATE inspections SET completed_at = '2020'",
    )
    settings(line, results_for="1y")
    boards = sql(line, "SELECT count(*) FROM boards")
    pruned = db("prune", "--config", line / "coserve.yaml", "--json")
    assert [(json.loads(pruned.stdout)["boards"],)] == boards
    assert db("check", "--config", line / "coserve.yaml").returncode == 0


def test_pruning_keeps_away_from_a_line_that_somebody_holds(line: Path) -> None:
    locks = claim(line / "coserve.yaml", load_config(line / "coserve.yaml"))
    refused = db("prune", "--config", line / "coserve.yaml")
    locks.close()
    assert refused.returncode == 1
    assert "in use" in refused.stderr
