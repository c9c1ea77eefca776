"""Releases between real lines: pushed, carried in a folder, pulled while boards are judged; and what is refused."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon.config.settings import load_config
from daemon.registry.signing import read_signing_key
from daemon.registry.store import Store
from experts.editions.folder import EditionFolder
from tests.contract.client import Line
from tests.editions import files_in_force
from tests.one_edition import content_of
from tests.tools.run_commands import coserve
from tools.experts.line import open_line
from tools.registry.releases import LineReleases
from tools.registry.releases import push as push_release

RULES = """\
boards:
  pair: {time_limit: 10m, components: {P: [P1, P2, P3, P4], Q: [Q1]}}
classifiers:
  "*": {expert: "{component}", pass: [ok, bad], review_below: 0.0}
"""
RULES_2 = RULES.replace("review_below: 0.0", "review_below: 0.1")


@pytest.fixture
def places(tmp_path: Path, version_folders: tuple[Path, Path]) -> dict[str, Path]:
    """Line a with another version of P and other rules in force than line b; Anna's keys; b takes Anna's releases."""
    for name in ("anna", "mallory"):
        coserve("keys", "new", name, "--sign", "--dir", tmp_path / "keys")
    settings: dict[str, Any] = {"plant": {"signers": ["../keys/anna.sign"]}, "memory": "100MB"}
    a = Line(tmp_path / "a", version_folders[0], RULES_2, **settings)
    b = Line(tmp_path / "b", version_folders[0], RULES, **settings)
    files_in_force(b.config)
    (tmp_path / "stick").mkdir()
    places = {"a": a.config, "b": b.config, "stick": tmp_path / "stick", "keys": tmp_path / "keys"}
    judge_by(places["a"], version_folders[1])
    return places


def judge_by(config: Path, experts: Path) -> None:
    """Put the P of another folder in force."""
    line, entry = Line.at(config), yaml.safe_load((experts / "catalog.yaml").read_text())["experts"]["P"]
    file = line.catalog.with_name(f"{entry['sha256']}.safetensors")
    if not file.exists():
        os.link(experts / entry["file"], file)
    line.change_entry("P", **entry | {"file": file.name})
    files_in_force(config)


def push(places: dict[str, Path], *words: object, key: str = "anna", **options: Any) -> str:
    secret = places["keys"] / f"{key}.sign_secret"
    done = coserve("plant", "push", places["a"], "--to", places["stick"], "--key", secret, "--json", *words, **options)
    return json.loads(done.stdout)["release"]


def pull(places: dict[str, Path], *words: object, status: int = 0) -> Any:
    done = coserve("plant", "pull", places["b"], "--from", places["stick"], *words, status=status)
    return " ".join(done.output.split())


def state_of(config: Path) -> str:
    """Return the content in force."""
    edition = EditionFolder(load_config(config, {}).catalog).in_force()
    assert edition is not None
    return content_of(edition)


def test_a_release_carried_in_a_folder_makes_another_line_judge_as_the_first(places: dict[str, Path]):
    before = state_of(places["b"])
    assert push(places, "--note", "better P") == "line/1"
    said = pull(places)
    assert "line/1, signed by anna.sign: 1 expert changed, rules changed" in said
    assert "edition 2 is in force; no daemon runs: its next start does" in said
    assert state_of(places["b"]) == state_of(places["a"]) != before
    assert not (places["b"].parent / "experts" / "releases" / "objects").exists()
    assert "0 experts changed; 0 B fetched; edition 2 is in force" in pull(places)  # again: nothing to do
    rules = places["b"].parent / "rules.yaml"
    rules.write_text(rules.read_text(encoding="utf-8") + "# mine\n", encoding="utf-8")
    push(places)
    assert "rules.yaml: edited, not in force: coserve reload first" in pull(places, status=1)
    assert "edition 3 is in force" in pull(places, "--discard")
    assert rules.read_text(encoding="utf-8") == RULES_2
    assert "edition 4 is in force" in pull(places, "--now")
    edition = EditionFolder(load_config(places["b"], {}).catalog).in_force()
    assert edition is not None
    assert edition.ends_earlier
    assert edition.release is not None
    assert (edition.why, edition.release.name, edition.release.number) == ("pull", "line", 2)
    coserve("check", places["b"])


def test_a_new_line_without_rules_and_experts_takes_both_from_a_release(places: dict[str, Path]):
    folder = places["b"].parent
    shutil.rmtree(folder / "experts")
    (folder / "rules.yaml").unlink()
    push(places)
    assert "2 experts changed, rules changed" in pull(places)
    assert state_of(places["b"]) == state_of(places["a"])
    assert (folder / "rules.yaml").read_text(encoding="utf-8") == RULES_2
    coserve("check", places["b"])


def test_a_push_signs_what_is_in_force_and_nothing_that_waits_in_the_files(places: dict[str, Path]):
    (places["a"].parent / "rules.yaml").write_text(RULES, encoding="utf-8")
    push(places)
    pull(places)
    assert state_of(places["b"]) == state_of(places["a"])
    shutil.rmtree(places["a"].parent / "experts" / "editions")
    secret = places["keys"] / "anna.sign_secret"
    done = coserve("plant", "push", places["a"], "--to", places["stick"], "--key", secret, status=1)
    assert "no edition is in force on this line yet: coserve reload, then push" in " ".join(done.output.split())


@pytest.mark.promise(
    "Prepared files",
    "a release | a signer that the line does not name, a changed manifest, a revoked key | refused before "
    "anything is read from it; nothing changes",
)
def test_releases_that_a_line_does_not_take_change_nothing(places: dict[str, Path]):
    before = state_of(places["b"])
    push(places, key="mallory")
    assert "line/1 is signed by nobody in plant.signers (anna.sign)" in pull(places, status=1)
    assert push(places) == "line/2"
    (manifest,) = (places["stick"] / "manifests" / "line").glob("2.json")
    original = manifest.read_bytes()
    manifest.write_bytes(original.replace(b'"number":2', b'"number":3'))
    assert "signed by nobody in plant.signers" in pull(places, status=1)
    manifest.write_bytes(original)
    shutil.copy(manifest, manifest.with_name("9.json"))  # an old release under a new number
    shutil.copy(manifest.with_suffix(".sig"), manifest.with_name("9.sig"))
    assert "line/9: its manifest says line/2" in pull(places, status=1)
    for file in manifest.parent.glob("9.*"):
        file.unlink()
    every = {file: file.read_bytes() for file in (places["stick"] / "objects").rglob("*") if file.is_file()}
    for file, content in every.items():
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "is damaged: its bytes do not have that sha256, and were deleted" in pull(places, status=1)
    done = coserve("plant", "releases", places["stick"], "--signer", places["keys"] / "anna.sign", "--json", status=1)
    rows = {row["release"]: (row["signer"], row["problem"]) for row in json.loads(done.stdout)}
    assert "signed by nobody" in rows["line/1"][1]
    assert rows["line/2"][0] == "anna.sign"
    assert "is damaged" in rows["line/2"][1]
    for file, content in every.items():
        file.write_bytes(content)
    assert state_of(places["b"]) == before
    config = yaml.safe_load(places["b"].read_text())
    places["b"].write_text(yaml.safe_dump(config | {"plant": {"signers": []}}))  # Anna's key is revoked
    assert "this line accepts no signers: name their keys in plant.signers" in pull(places, status=1)
    places["b"].write_text(yaml.safe_dump(config))
    pull(places)
    assert state_of(places["b"]) != before


@pytest.mark.promise(
    "Prepared files",
    "a release | one of last year, sent again | numbers only grow, and releases expire: refused unless a "
    "person says `--allow-older`",
)
def test_a_replay_an_expired_release_and_a_way_back_by_a_person(
    places: dict[str, Path], version_folders: tuple[Path, Path]
):
    push(places)
    pull(places)
    first = state_of(places["b"])
    judge_by(places["a"], version_folders[0])
    push(places)
    pull(places)
    second = state_of(places["b"])
    assert first != second
    said = pull(places, "--release", "line/1", status=1)
    assert "line/1 is older than line/2, which this line has had: it may be a replay" in said
    assert state_of(places["b"]) == second
    pull(places, "--release", "line/1", "--allow-older")
    assert state_of(places["b"]) == first
    key = read_signing_key(places["keys"] / "anna.sign_secret")
    push_release(load_config(places["a"], {}), Store(places["stick"]), key, "line", valid_for_s=0.0)
    assert "line/3 expired at" in pull(places, status=1)
    shutil.rmtree(places["stick"])
    places["stick"].mkdir()
    push(places, "--no-rules")  # the store was lost, and numbers began anew
    assert "line/1 is another release than the one of this number" in pull(places, "--allow-older", status=1)


@pytest.mark.promise(
    "Prepared files",
    "a release | an older one that a hub offers, as if it were the newest | refused; a person may go back with "
    "`--allow-older`, and a timer leaves that as it is",
)
@pytest.mark.promise(
    "Versions of experts",
    "A timer's pull takes the newest release of the line's signers once, and leaves a person's way back as it is",
)
def test_a_timers_pull_takes_what_is_new_and_signed_here_and_nothing_else(
    places: dict[str, Path], version_folders: tuple[Path, Path]
):
    push(places)
    assert "line/1, signed by anna.sign: 1 expert changed" in pull(places, "--newest")
    first = state_of(places["b"])
    push(places, key="mallory")
    assert "this line has had line/1:" in pull(places, "--newest")
    judge_by(places["a"], version_folders[0])
    push(places)
    assert "line/3, signed by anna.sign" in pull(places, "--newest")
    assert state_of(places["b"]) != first
    pull(places, "--release", "line/1", "--allow-older")
    assert "this line has had line/3:" in pull(places, "--newest")  # a person went back
    assert state_of(places["b"]) == first


def test_a_pull_while_another_is_under_way_waits_and_changes_nothing(places: dict[str, Path]):
    push(places)
    before = state_of(places["b"])
    with LineReleases(open_line(places["b"])).pulling():
        assert "another pull is under way on this line" in pull(places, status=1)
    assert state_of(places["b"]) == before
    pull(places)


@pytest.mark.promise(
    "Prepared files",
    "a release | a key that the hub has revoked | a line learns of it at its next pull, which "
    "`coserve-pull.timer` begins ten minutes after the last one. From then on it refuses what the "
    "key signed, from every source; if the release in force is among it, each `pull --newest` fails "
    "and says so",
)
def test_a_signer_that_the_source_has_revoked_is_refused_there_and_then_everywhere(places: dict[str, Path]):
    before = state_of(places["b"])
    push(places)
    (places["stick"] / "revoked").mkdir()
    shutil.copy(places["keys"] / "anna.sign", places["stick"] / "revoked" / "lost-notebook.sign")
    assert "line/1 is signed by anna.sign, which is revoked" in pull(places, status=1)
    shutil.rmtree(places["stick"] / "revoked")  # another stick does not know it; the line does
    assert "line/1 is signed by anna.sign, which is revoked" in pull(places, status=1)
    assert state_of(places["b"]) == before
    assert "line/1 is signed by anna.sign, which is revoked" in pull(places, "--newest", status=1)
    (noted,) = (places["b"].parent / "experts" / "releases" / "revoked").iterdir()
    noted.write_text("no key")
    assert "is not a public Ed25519 key" in pull(places, status=1)
    noted.unlink()
    pull(places)
    (places["stick"] / "revoked").mkdir()
    shutil.copy(places["keys"] / "anna.sign", places["stick"] / "revoked")
    said = pull(places, "--newest", status=1)
    assert "line/1, which this line took last, is signed by anna.sign, which is revoked" in said


def test_a_line_that_judges_takes_a_release_and_each_board_keeps_the_edition_it_began_in(places: dict[str, Path]):
    push(places)
    line = Line.at(places["b"])

    def send(serial: str, *positions: str) -> None:
        for position in positions:
            line.send(board={"type": "pair", "serial": serial}, component=position[0], designator=position)

    with line.service():
        send("over", "P1", "P2")
        line.idle()
        assert "the daemon judges by it" in pull(places)
        send("over", "P3", "P4", "Q1")
        send("new", "P1", "P2", "P3", "P4", "Q1")
        line.boards("over")
        line.boards("new")
    rows = line.rows(
        "SELECT DISTINCT b.serial, b.edition, b.rules_version, s.expert_version FROM boards b"
        " JOIN inspections i USING (board_id) JOIN stages s USING (inspection_id) WHERE s.expert = 'P' ORDER BY 2"
    )
    assert [row[:2] for row in rows] == [("over", 1), ("new", 2)]
    assert rows[0][2] != rows[1][2]
    assert rows[0][3] != rows[1][3]
