"""An edition is made by one function: checked, put in force and adopted, or nothing has changed."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon.check import check_line
from daemon.config.settings import Config, load_config
from daemon.errors import ConfigError
from daemon.line.line import served_by
from daemon.line.making import Draft, Made, draft_of, make_edition, working_files
from daemon.line.served import Served, compile_stored
from experts.drift import BINS
from experts.editions.edition import Edition, EditionError
from experts.editions.folder import EditionFolder, entries_of
from tests.experts.editions.test_edition_folder import dies_at
from tests.lines import a_line

pytestmark = pytest.mark.not_fast("a reload waits until files are quiet")


@dataclass
class ARunningLine:
    """A daemon that adopts what it is told, unless `refuses`; `rows` is the database's highest number.

    `digests` are those of its rows.
    """

    rows: int | None = 0
    refuses: bool = False
    digests: dict[int, str] = field(default_factory=dict[int, str])
    adopted: list[int] = field(default_factory=list[int])

    def highest(self) -> int | None:
        return self.rows

    def digest(self, number: int) -> str | None:
        return self.digests.get(number)

    def check(self, served: Served) -> None:
        if self.refuses:
            raise ConfigError([f"edition {served.number} does not fit beside what is pinned"])

    def adopt(self, number: int) -> dict[str, Any] | None:
        self.adopted.append(number)
        return {"edition": number}


@pytest.fixture
def config(tmp_path: Path, experts_folder: Path) -> Config:
    return load_config(a_line(tmp_path / "line", experts_folder))


def loaded(config: Config, running: ARunningLine | None = None, note: str | None = None) -> Made:
    return make_edition(config, "ines", lambda _: working_files(config, note), running or ARunningLine())


def changed(config: Config, expert: str = "R0402", **fields: Any) -> Callable[[Edition | None], Draft]:

    def build(before: Edition | None) -> Draft:
        assert before is not None
        folder = EditionFolder(config.catalog)
        experts = folder.absolute_entries(before)
        return Draft(before.rules, experts | {expert: experts[expert].model_copy(update=fields)}, "promote")

    return build


def test_what_was_edited_is_in_force_after_a_reload_and_only_then(config: Config) -> None:
    running = ARunningLine()
    made = loaded(config, running)
    folder = EditionFolder(config.catalog)
    assert (made.is_new, made.edition.number, made.edition.why, made.lacking) == (True, 1, "reload", {})
    assert folder.in_force() == made.edition
    assert made.edition.rules == config.rules.read_text()
    assert {*folder.weights.all()} == made.edition.weights
    config.rules.write_text(config.rules.read_text() + "# a remark\n")
    assert folder.in_force() == made.edition
    made = loaded(config, running)
    assert (made.edition.number, made.edition.parent) == (2, 1)
    assert running.adopted == [1, 2]
    served = compile_stored(made.edition, folder)
    assert served.routes.text.endswith("# a remark\n")
    assert all(spec.file.is_relative_to(folder.weights.folder) for spec in served.catalog.values())


def test_unchanged_files_make_no_edition_but_missing_weights_come_in(config: Config) -> None:
    made, folder = loaded(config), EditionFolder(config.catalog)
    sha256 = made.edition.experts["R0402"].sha256
    folder.weights.remove(sha256)
    again = loaded(config)
    assert (again.is_new, again.edition) == (False, made.edition)
    assert folder.numbers() == [1]
    assert folder.weights.has(sha256)


def test_weights_that_are_missing_or_damaged_cost_one_expert_and_no_reload(config: Config) -> None:
    sha256 = loaded(config).edition.experts["R0402"].sha256
    folder = EditionFolder(config.catalog)
    folder.weights.remove(sha256)
    (file,) = config.catalog.parent.glob("R0402.*")
    file.unlink()
    made = loaded(config)
    assert [*made.lacking] == [sha256]
    assert "there is no such weights file" in made.lacking[sha256]
    with pytest.raises(EditionError, match="there is no such weights file"):
        make_edition(config, "ines", changed(config, temperature=2.0), ARunningLine())
    assert folder.current() == made.edition.number


def test_a_mistake_in_the_files_leaves_everything_as_it_was(config: Config) -> None:
    loaded(config)
    config.rules.write_text("boards: [")
    running = ARunningLine()
    with pytest.raises(ConfigError, match=r"rules\.yaml:2"):
        loaded(config, running)
    assert EditionFolder(config.catalog).current() == 1
    assert running.adopted == []


def test_a_policy_that_is_unknown_is_a_mistake_of_its_key(config: Config) -> None:
    with pytest.raises(ConfigError, match="policy: 'coserve-plis' is unknown"):
        loaded(config.model_copy(update={"policy": "coserve-plis"}))


@pytest.mark.promise("Versions of experts", "A change that the daemon refuses is undone")
def test_what_the_daemon_refuses_never_comes_into_force(config: Config) -> None:
    loaded(config)
    with pytest.raises(ConfigError, match="beside what is pinned"):
        make_edition(config, "ines", changed(config, temperature=2.0), ARunningLine(refuses=True))
    folder = EditionFolder(config.catalog)
    assert (folder.current(), folder.numbers()) == (1, [1])


def test_a_promotion_writes_the_working_files_anew_unless_they_hold_edits(config: Config) -> None:
    loaded(config)
    promote = changed(config, temperature=2.0)
    made = make_edition(config, "ines", promote, ARunningLine())
    assert (made.edition.number, made.edition.why) == (2, "promote")
    assert entries_of(config.catalog) == made.edition.experts
    assert loaded(config).is_new is False
    config.rules.write_text(config.rules.read_text() + "# mine\n")
    with pytest.raises(EditionError, match=r"rules\.yaml: edited, not in force: coserve reload first"):
        make_edition(config, "ines", changed(config, temperature=3.0), ARunningLine())
    for is_new in (True, False):
        config.rules.write_text(config.rules.read_text() + "# mine\n")
        made = make_edition(config, "ines", changed(config, temperature=3.0), ARunningLine(), discard=True)
        assert (made.is_new, config.rules.read_text()) == (is_new, made.edition.rules)


@pytest.mark.parametrize("saved", ["while the daemon checks", "while it adopts"])
def test_an_edit_that_is_saved_during_a_promotion_is_kept(config: Config, saved: str) -> None:
    loaded(config)
    mine = config.rules.read_text() + "# mine\n"

    class AnEditor(ARunningLine):
        def check(self, served: Served) -> None:
            if saved == "while the daemon checks":
                config.rules.write_text(mine)

        def adopt(self, number: int) -> dict[str, Any] | None:
            config.rules.write_text(mine)
            return super().adopt(number)

    def promote(before: Edition | None) -> Draft:
        draft = changed(config, temperature=2.0)(before)
        return replace(draft, rules=f"# promoted\n{draft.rules}")

    with pytest.raises(EditionError, match=r"rules\.yaml.* (edited, not in force|was saved while edition 2 came)"):
        make_edition(config, "ines", promote, AnEditor())
    assert config.rules.read_text() == mine
    assert EditionFolder(config.catalog).current() == (1 if saved == "while the daemon checks" else 2)


def test_working_files_that_this_user_may_not_write_are_named_before_the_edition_is_in_force(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(config)
    monkeypatch.setattr("experts.editions.folder.os.access", lambda *_: False)
    with pytest.raises(EditionError, match=r"catalog\.yaml: edition 2 would change it, and this user may not write it"):
        make_edition(config, "ines", changed(config, temperature=2.0), ARunningLine())
    folder = EditionFolder(config.catalog)
    assert (folder.current(), folder.numbers(), folder.mark.exists()) == (1, [1], False)


def test_numbers_are_above_those_of_the_folder_and_of_the_database(config: Config) -> None:
    assert loaded(config, ARunningLine(rows=6)).edition.number == 7
    assert loaded(config, ARunningLine(rows=7, digests={7: "0" * 64})).edition.number == 8
    with pytest.raises(
        EditionError, match="the database cannot be read, and a new edition could take the number of another"
    ):
        make_edition(config, "ines", changed(config, temperature=2.0), ARunningLine(rows=None))


def test_a_disk_without_room_for_the_weights_is_named_before_anything_is_copied(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = EditionFolder(config.catalog)
    shutil.rmtree(folder.weights.folder)
    usage = shutil.disk_usage(folder.root)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(EditionError, match=r"MB of weights do not fit in 0\.0 MB of free space: make room"):
        loaded(config)
    assert (folder.current(), folder.weights.all()) == (None, {})


@pytest.mark.promise(
    "Versions of experts",
    "A kill at any step leaves the old or the new version complete, and work can continue from there",
)
@pytest.mark.parametrize("deed", ["reload", "promote", "measure", "rollback"])
def test_killed_at_any_step_the_edition_before_or_the_new_one_is_in_force(
    tmp_path: Path, config: Config, deed: str
) -> None:
    before = loaded(config).edition
    if deed == "rollback":
        before = make_edition(config, "ines", changed(config, temperature=2.0), ARunningLine()).edition
    if deed == "reload":
        config.rules.write_text(config.rules.read_text() + "# new\n")
    seen, number, killed = list[Edition](), 0, True
    while killed:
        number += 1
        root = tmp_path / f"at-{number}"
        shutil.copytree(config.rules.parent, root)
        there = replace_paths(config, root)
        killed = dies_at(number, do, deed, there)
        folder = EditionFolder(there.catalog)
        in_force = folder.in_force()
        assert in_force is not None
        served = compile_stored(in_force, folder)
        assert {*served.catalog.headers} == {*in_force.experts}
        seen.append(in_force)
        made = make_edition(there, "ben", changed(there, temperature=4.0), ARunningLine(), discard=True)
        assert made.edition.number > in_force.number
        assert entries_of(there.catalog) == made.edition.experts
        shutil.rmtree(root)
    assert {edition.number for edition in seen} == {before.number, before.number + 1}
    assert all(edition == before or edition.has_content_of(seen[-1]) for edition in seen)


def do(deed: str, config: Config) -> None:
    """Each kind of edition, as its command makes it (tools/experts)."""
    running = ARunningLine()
    if deed == "reload":
        loaded(config, running)
    elif deed == "promote":
        make_edition(config, "ines", changed(config, temperature=2.0), running)
    elif deed == "measure":
        counts = {"ok": (1,) * BINS}
        build = changed(config, confidences=counts)
        make_edition(config, "ines", lambda before: replace(build(before), why="reload"), running)
    else:
        folder = EditionFolder(config.catalog)
        make_edition(config, "ines", lambda _: draft_of(folder.read(1), folder, "rollback"), running, anew=True)


def replace_paths(config: Config, root: Path) -> Config:
    def moved(path: Path) -> Path:
        return root / path.relative_to(config.rules.parent)

    return config.model_copy(update={"catalog": moved(config.catalog), "rules": moved(config.rules)})


def test_a_catalogs_folder_serves_one_line_and_its_copy_another(config: Config, tmp_path: Path) -> None:
    config.journal.mkdir()
    loaded(config)
    other = config.model_copy(update={"journal": tmp_path / "other/journal", "rules": tmp_path / "other.yaml"})
    belongs = r"belongs to the line whose journal is .*: give this line"
    with pytest.raises(EditionError, match=belongs):
        loaded(other)
    with pytest.raises(ConfigError, match=belongs):
        served_by(other)
    shutil.copytree(config.catalog.parent, tmp_path / "copy")
    copied = other.model_copy(update={"catalog": tmp_path / "copy/catalog.yaml", "rules": config.rules})
    assert loaded(copied).edition.number == 1


@pytest.mark.promise(
    "Versions of experts",
    "a `confidence_floor` above a threshold of the rules, a temperature beyond .05 to 20 | `check`, `reload`, "
    "`promote` and `pull` refuse it",
)
@pytest.mark.parametrize(
    ("expert", "fields", "says"),
    [
        ("yolo-solder", {"confidence_floor": 0.995}, r"reports no box below 0\.995"),
        ("R0402", {"temperature": 30.0}, r"30 is not from 0\.05 to 20"),
    ],
)
def test_settings_that_contradict_each_other_come_into_force_by_no_command(
    config: Config, expert: str, fields: dict[str, Any], says: str
) -> None:
    before = loaded(config).edition
    with pytest.raises(ConfigError, match=says):
        make_edition(config, "ines", changed(config, expert, **fields), ARunningLine())
    catalog = yaml.safe_load(config.catalog.read_text())
    catalog["experts"][expert] |= fields
    config.catalog.write_text(yaml.safe_dump(catalog))
    with pytest.raises(ConfigError, match=says):
        loaded(config)
    assert any(re.search(says, problem) for problem in check_line(config.catalog.parents[1] / "coserve.yaml")[0])
    assert EditionFolder(config.catalog).in_force() == before


def test_an_edition_from_before_its_settings_were_refused_goes_on_serving(config: Config) -> None:
    """A line that was updated judges on; the next edition must be right."""
    edition = loaded(config).edition
    experts = edition.experts | {"R0402": edition.experts["R0402"].model_copy(update={"temperature": 30.0})}
    experts |= {"yolo-solder": edition.experts["yolo-solder"].model_copy(update={"confidence_floor": 0.995})}
    served = compile_stored(edition.model_copy(update={"experts": experts}), EditionFolder(config.catalog))
    assert len(served.catalog) == len(experts)
