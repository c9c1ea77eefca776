"""`coserve experts …`: what there is, what is wrong with it, another version in and out; each refusal by its reason."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experts.catalog import read_catalog
from experts.editions.folder import EditionFolder
from tests.contract.client import Line
from tests.lines import COSERVE_RUN, a_jpeg
from tests.tools.run_commands import coserve

RULES = """\
boards:
  free: {extras: allow, components: {P: 1, Q: 1}}
classifiers:
  "*": {expert: "{component}", pass: [ok], review_below: 0.0}
"""


@pytest.fixture
def line(tmp_path: Path, version_folders: tuple[Path, Path]) -> Line:
    return Line(tmp_path / "line", version_folders[0], RULES, COSERVE_RUN, memory="100MB")


def run(line: Line, *arguments: str, status: int = 0) -> Any:
    """The command's JSON, or what it said where it failed."""
    done = coserve("experts", *arguments, "--config", line.config, "--json", status=status)
    return json.loads(done.stdout) if done.stdout else done.stderr


def output_of(line: Line, *arguments: str) -> str:
    return coserve("experts", *arguments, "--config", line.config).stdout


def entry(line: Line, name: str = "P") -> Any:
    """What is in force: the edition's entry, and before the first one the catalog's."""
    catalog = line.folder / "experts" / "catalog.yaml"
    edition = EditionFolder(catalog).in_force()
    return (edition.experts if edition else read_catalog(catalog))[name]


def weights(line: Line, sha256: str) -> Path:
    return EditionFolder(line.folder / "experts" / "catalog.yaml").weights.place(sha256)


def put(line: Line, folder: Path) -> str:
    return run(line, "put", "P", str(folder))["version"]


def test_a_running_line_serves_the_new_version_and_every_command_knows(line: Line, version_folders: tuple[Path, Path]):
    first = entry(line).sha256[:12]
    control = line.folder / "run" / "control.sock"
    away = control.with_suffix(".away")
    with line.service():
        rows, served = run(line), line.control("experts")["experts"]
        assert [row["expert"] for row in rows] == [row["expert"] for row in served] == ["P", "Q"]
        assert rows[0].keys() == served[0].keys()
        assert "resident" in output_of(line)
        line.result(line.send(a_jpeg(1), board={"type": "free", "serial": "before"}))
        second = put(line, version_folders[1])
        assert run(line, "promote", "P", second)["heard"]
        line.result(line.send(a_jpeg(1), board={"type": "free", "serial": "after"}))
        shown = run(line, "show", "P")
        assert shown["serving"]["version"] == second
        assert {row["version"]: row["verdicts"] for row in shown["versions"]} == {first: 1, second: 1}
        # A daemon that could not be told goes on with what it has, and nothing that it serves is pruned.
        control.rename(away)
        assert run(line, "rollback", "P")["heard"] is False
        away.rename(control)
        assert "waits for `coserve reload`" in output_of(line, "show", "P")
        assert run(line, "prune", "--keep", "1") == []
        line.control("reload")
        assert "waits for" not in output_of(line, "show", "P")
        line.result(line.send(a_jpeg(1), board={"type": "free", "serial": "at last"}))
    assert run(line, "show", "P")["serving"] is None
    assert run(line, "list")[0]["verdicts"] == 3


def test_a_version_goes_in_and_back_out_with_nobody_running(line: Line, version_folders: tuple[Path, Path]):
    first = entry(line).sha256[:12]
    second = put(line, version_folders[1])
    assert entry(line).sha256[:12] == first
    assert "candidate" in output_of(line, "show", "P")
    done = run(line, "promote", "P", second[:5])
    assert (done["version"], done["before"], done["heard"]) == (second, first, False)
    assert done["note"] == "no daemon runs: the next start puts it in force"
    assert entry(line).sha256[:12] == second
    assert run(line, "verify")["ok"]
    assert run(line, "rollback", "P")["version"] == first == entry(line).sha256[:12]
    assert "is the first version here" in run(line, "rollback", "P", status=1)
    shown = run(line, "show", "P")
    assert [step["did"] for step in shown["steps"]] == ["put", "found", "promote", "rollback"]
    assert {row["version"]: row["state"] for row in shown["versions"]} == {first: "in force", second: "kept"}
    (use,) = shown["rules"]
    assert (use["board_type"], use["components"], use["step"], use["before"]) == ("free", ["P"], 1, [])
    assert use["judges"] == "passes ok"


def editions(line: Line) -> Any:
    return json.loads(coserve("rollback", "--config", line.config, "--json").stdout)


@pytest.mark.promise("Versions of experts", "A whole edition comes back, while its weights are there")
def test_an_edition_comes_back_as_a_new_one_unless_its_weights_are_gone(line: Line, version_folders: tuple[Path, Path]):
    rules, first = line.folder / "rules.yaml", entry(line).sha256
    coserve("reload", "--config", line.config)
    text = rules.read_text()
    rules.write_text(text + "# another\n")
    refused = run(line, "promote", "P", second := put(line, version_folders[1]), status=1)
    assert "rules.yaml: edited, not in force: coserve reload first" in refused
    coserve("reload", "--config", line.config)
    run(line, "promote", "P", second, "--note", "better")
    done = json.loads(coserve("rollback", "1", "--config", line.config, "--json").stdout)
    assert done == {"edition": 4, "content_of": 1, "heard": False}
    assert (rules.read_text(), entry(line).sha256) == (text, first)
    rows = [(row["number"], row["why"], row["note"], row["is_in_force"]) for row in editions(line)]
    assert rows == [
        (1, "reload", None, False),
        (2, "reload", None, False),
        (3, "promote", "better", False),
        (4, "rollback", None, True),
    ]
    refused = coserve("rollback", "4", "--config", line.config, status=1).stderr
    assert "edition 4 is in force already, and nothing was edited since" in refused.replace("\n", " ")
    assert "in force" in coserve("rollback", "--config", line.config).stdout
    folder = EditionFolder(line.folder / "experts" / "catalog.yaml")
    next(weights(line, second).parent.glob(f"{second}*")).unlink()
    refused = coserve("rollback", "3", "--config", line.config, status=1).stderr
    assert "edition 3 cannot come back: the weights of P were deleted" in refused.replace("\n", " ")
    assert len(editions(line)) == 4
    # One that is damaged is named by every command, and a way back.
    folder.file(4).chmod(0o644)
    folder.file(4).write_text("{")
    assert "000004.json is cut off or damaged" in run(line, "list", status=2)
    assert [row["number"] for row in editions(line)] == [1, 2, 3]
    with folder.changing():
        refused = coserve("rollback", "2", "--config", line.config, status=1).stderr
    assert f"process {os.getpid()} is making an edition: try again" in refused.replace("\n", " ")
    coserve("rollback", "2", "--config", line.config)
    assert (folder.current(), rules.read_text()) == (5, text + "# another\n")


def test_verify_names_the_file_and_what_differs(line: Line, version_folders: tuple[Path, Path]):
    second = put(line, version_folders[1])
    assert len(run(line, "verify", "--forward")["versions"]) == 3
    damaged = next(weights(line, second).parent.glob(f"{second}*"))
    damaged.chmod(0o644)
    with damaged.open("r+b") as file:
        file.seek(-2000, os.SEEK_END)
        file.write(b"\x7f\xff")
    report = run(line, "verify", "P", status=1)
    assert [row["version"] for row in report["versions"] if row["problems"]] == [second]
    (problem,) = (problem for row in report["versions"] for problem in row["problems"])
    assert str(damaged) in problem
    assert "sha256" in problem
    assert "sha256" in run(line, "promote", "P", second, status=1)
    run(line, "put", "P", version_folders[1])  # the same weights once more replace the damaged ones
    assert run(line, "verify", "P")["ok"]
    run(line, "promote", "P", second)
    damaged = next(weights(line, second).parent.glob(f"{second}*"))
    damaged.chmod(0o644)
    os.truncate(damaged, 1000)
    coserve("rollback", "1", "--config", line.config)
    assert "damaged header" in coserve("rollback", "2", "--config", line.config, status=1).stderr
    assert run(line, "verify", "Q")["ok"]
    assert "there is no expert R" in run(line, "verify", "R", status=1)


def another(folder: Path, architecture: str, *labels: str, store: str = "float32") -> None:
    """Write an expert P of this architecture with these labels: only its header and entry name them."""
    import numpy as np
    import torch

    from experts.catalog import write_catalog
    from experts.vision import frameworks
    from tools.training.expert_file import Form
    from tools.training.importer import import_model

    torch.manual_seed(5)
    network = getattr(frameworks.torchvision().models, architecture)(num_classes=2)
    black = [np.zeros((32, 32, 3), np.uint8)]
    form = Form(store=store, tolerance=1.0)
    report = import_model(network, architecture, labels, 32, folder, expert="P", images=black, form=form)
    write_catalog(folder / "catalog.yaml", {"P": report.entry})


def with_weights(folder: Path, source: Path, change: Callable[[bytes], bytes]) -> None:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    (folder / "P.safetensors").write_bytes(change((source / "P.safetensors").read_bytes()))


@pytest.mark.promise(
    "Versions of experts", "A version that does not fit the rules or the memory is refused and leaves nothing behind"
)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder, _: another(folder, "resnet18", "good", "poor"), "has no label `ok`"),
        (lambda folder, _: another(folder, "resnet50", "ok", "bad"), "cpu has 60.0 MB: raise it to at least 94.1 MB"),
        (lambda *folders: with_weights(*folders, lambda content: content[:1_000_000]), "is truncated"),
        (lambda *folders: with_weights(*folders, lambda _: pickle.dumps({"os": os.system})), "not a safetensors file"),
        (lambda _folder, _: None, "holds no catalog.yaml"),
    ],
)
def test_a_version_that_the_line_cannot_use_is_refused_and_leaves_nothing(
    tmp_path: Path, version_folders: tuple[Path, Path], make, reason: str
):
    line = Line(tmp_path / "line", version_folders[0], RULES, COSERVE_RUN, memory="60MB")
    stored = EditionFolder(line.folder / "experts" / "catalog.yaml").weights
    before, folder = stored.all(), tmp_path / "new"
    folder.mkdir()
    make(folder, version_folders[1])
    assert reason in run(line, "put", "P", str(folder), status=1)
    assert run(line, "list")[0]["kept"] == []
    assert stored.all() == before


def test_a_weights_file_brings_the_entry_that_lies_beside_it(
    tmp_path: Path, line: Line, version_folders: tuple[Path, Path]
):
    alone, file = tmp_path / "alone.safetensors", version_folders[1] / "P.safetensors"
    shutil.copy(file, alone)
    assert "is described by no catalog.yaml" in run(line, "put", "P", str(alone), status=1)
    run(line, "promote", "P", run(line, "put", "P", str(file))["version"])
    catalog = version_folders[1] / "catalog.yaml"
    assert entry(line).model_copy(update={"file": "P.safetensors"}) == read_catalog(catalog)["P"]


def test_what_is_imported_over_an_expert_in_force_is_a_candidate_and_a_new_one_an_entry(tmp_path: Path, line: Line):
    import torch

    from experts.vision import frameworks

    coserve("reload", "--config", line.config)
    file, experts = tmp_path / "trained.pth", line.folder / "experts"
    torch.save(frameworks.torchvision().models.resnet18(num_classes=2).state_dict(), file)
    form = ("--architecture", "resnet18", "--classes", "ok,bad", "--input-size", "32", "--out", experts, "--json")
    form += ("--normalize", "imagenet")
    before = (experts / "catalog.yaml").read_bytes(), (experts / "P.safetensors").read_bytes()
    done = json.loads(coserve("import", file, "--id", "P", *form).stdout)
    states = {row["version"]: row["state"] for row in run(line, "show", "P")["versions"]}
    assert states == {entry(line).sha256[:12]: "in force", done["candidate"]: "candidate"}
    assert Path(done["file"]).is_relative_to(experts / "weights")
    assert ((experts / "catalog.yaml").read_bytes(), (experts / "P.safetensors").read_bytes()) == before
    assert not list(experts.glob(".new-*"))
    assert json.loads(coserve("import", file, "--id", "N", *form).stdout)["candidate"] is None
    assert [*read_catalog(experts / "catalog.yaml")] == ["P", "Q", "N"]
    assert "N" not in [row["expert"] for row in run(line, "list")]
    coserve("reload", "--config", line.config)
    assert "N" in [row["expert"] for row in run(line, "list")]


@pytest.mark.test_all
def test_prune_keeps_what_is_in_force_what_one_goes_back_to_and_candidates(
    line: Line, version_folders: tuple[Path, Path]
):
    first, second = entry(line).sha256[:12], put(line, version_folders[1])
    assert run(line, "prune") == []  # a candidate
    run(line, "promote", "P", second)
    assert run(line, "prune", "--keep", "1") == []  # the one to go back to
    run(line, "rollback", "P")
    assert run(line, "prune", "--keep", "1") == []  # the edition before
    (line.folder / "rules.yaml").write_text(RULES + "# other\n")
    coserve("reload", "--config", line.config)
    (pruned,) = run(line, "prune", "--keep", "1")
    assert (pruned["expert"], pruned["version"]) == ("P", second)
    assert pruned["freed_bytes"] > 40_000_000
    assert entry(line).sha256[:12] == first
    assert run(line, "verify")["ok"]


def test_confidences_are_measured_and_compared_with_recent_answers(tmp_path: Path, line: Line):
    images = tmp_path / "images"
    images.mkdir()
    for seed in range(12):
        (images / f"{seed}.jpg").write_bytes(a_jpeg(seed))
    (images / "notes.txt").write_text("not an image")
    measured = run(line, "measure", "P", str(images))
    assert sum(map(sum, measured["confidences"].values())) == 12
    assert run(line, "show", "P")["drift"]["grade"] == "too few"
    assert "12 images held out" in output_of(line, "show", "P")
    assert "measure" in output_of(line, "show", "Q")
    assert [row["note"] for row in editions(line)] == [None, "measure"]
    assert entry(line).confidences == read_catalog(line.folder / "experts" / "catalog.yaml")["P"].confidences
    assert "holds no image" in run(line, "measure", "P", str(tmp_path / "line" / "experts"), status=1)
