"""A version promoted and rolled back under load: every stored answer is by the version that it names, none is lost."""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client import Line
from tests.lines import COSERVE_RUN, RULES_OF_VERSIONS, a_jpeg
from tools.experts.change import put, switch
from tools.experts.line import open_line

IMAGES, SWITCHES = 200, 6


def images() -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield images of boards of their own: each begins in the edition in force."""
    pictures = [a_jpeg(seed) for seed in range(16)]
    for number in itertools.count():
        board = {"type": "free", "serial": f"S{number}"}
        yield pictures[number % 16], {"board": board, "component": "P" if number % 4 else "Q"}


def answers_of(line: Line, version: str) -> int:
    return line.rows("SELECT count(*) FROM stages WHERE expert_version = ?", version)[0][0]


@pytest.mark.promise(
    "Versions of experts",
    "Promoting or rolling back a version under load loses no image, and each answer comes from the version "
    "that it names",
)
def test_switches_under_load_lose_nothing_and_every_answer_is_of_the_version_it_names(
    tmp_path: Path, version_folders: tuple[Path, Path]
):
    line = Line(tmp_path / "line", version_folders[0], RULES_OF_VERSIONS, COSERVE_RUN, memory="100MB")
    with line.service():
        experts = open_line(line.config)
        old = experts.experts()["P"].version or ""
        new = put(experts, "P", version_folders[1])
        with line.camera(images()) as account:
            for number in range(SWITCHES):
                before = answers_of(line, version := (new, old)[number % 2])
                done = switch(experts, "P", new if version == new else None)
                assert (done["version"], done["heard"]) == (version, True)
                line.wait(lambda version=version, before=before: answers_of(line, version) > before)
            line.wait(lambda: account.answered >= IMAGES)
        line.idle()
    rows = line.rows(
        "SELECT i.image_id, i.verdict, s.expert, s.expert_version, s.label"
        " FROM inspections i LEFT JOIN stages s ON s.inspection_id = i.inspection_id WHERE i.status = 'done'"
    )
    assert len(rows) == account.sent
    assert {verdict for _, verdict, *_ in rows} == {"pass"}  # each label passes: nothing is unknown, nothing refused
    answers: dict[tuple[int, str], Counter[str]] = {}
    for image_id, _, expert, version, label in rows:
        if expert == "P":
            answers.setdefault((int(image_id) % 16, version), Counter())[label] += 1
    assert {version for _, version in answers} == {old, new}
    for (picture, version), labels in answers.items():
        assert len(labels) == 1, f"picture {picture} got {labels} from version {version}"
        if version == new and (picture, old) in answers:
            assert answers[picture, old].keys() != labels.keys()
    used = dict(line.rows("SELECT expert_version, origin FROM expert_versions WHERE expert = 'P'"))
    assert used.keys() == {old, new}
