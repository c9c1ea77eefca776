"""Text, traces and measurements of language models, on a fixture made very small."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from experts.moe.trace import load_popularity, load_trace
from experts.moe.weights.prepared import TRAIN, PreparedFiles

pytest.importorskip("transformers", reason="needs the extra `moe`")

from experts.moe.library import transformers
from tests.moe.corpus import DOMAINS, CorpusDocument
from tests.moe.fixture import FixtureRecipe, make_fixture
from tests.moe.side import SideJob, measure
from tools.cli.main import app

SMALL = replace(FixtureRecipe(), layers=2, width=32, experts=4, vocabulary=320, window=32, windows_of_domain=1, steps=4)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [
        CorpusDocument(domain, f"{domain}-{number}.txt", f"{domain} is free as in {number}. " * 40)
        for domain in DOMAINS
        for number in range(20)
    ]
    out = tmp_path_factory.mktemp("moe") / "fixture"
    assert make_fixture(out, SMALL, documents)
    return out


def moe(*words: object):
    return CliRunner().invoke(app, ["moe", *map(str, words)])


def test_a_trace_holds_the_choices_of_the_unmodified_models_gates(small: Path):
    done = moe("trace", small, "--prompts", 2, "--length", 16)
    assert done.exit_code == 0, done.output
    prepared = PreparedFiles(small)
    trace = load_trace(prepared, TRAIN)
    assert trace.tasks == DOMAINS
    assert (trace.prompts, len(trace.token)) == (10, 160)
    model = transformers().AutoModelForCausalLM.from_pretrained(small).eval()
    ids = trace.token[trace.span(3)].long()[None]
    with torch.no_grad():
        gates = model.model(ids, output_router_logits=True).router_logits
    for layer, logits in enumerate(gates):
        weight, index = logits.float().softmax(-1).topk(2)
        assert torch.equal(trace.index[trace.span(3), layer].long(), index)
        expected = (weight / weight.sum(-1, keepdim=True)).to(torch.float16)
        assert torch.allclose(trace.weight[trace.span(3), layer], expected, atol=1e-3)
    assert load_popularity(prepared).sum(-1).tolist() == pytest.approx([1.0, 1.0])


def test_tasks_are_the_folders_of_ones_own_texts_and_without_any_there_is_pythons_manual(small: Path, tmp_path: Path):
    texts = tmp_path / "texts"
    for name in ("report/one.txt", "report/deeper/two.txt", "chat/three.txt"):
        (texts / name).parent.mkdir(parents=True, exist_ok=True)
        (texts / name).write_text("of the board and its parts " * 40)
    traced = {}
    for options in (("--texts", texts), ()):
        model = tmp_path / f"model-{len(options)}"
        shutil.copytree(small, model, ignore=shutil.ignore_patterns("coserve"))
        done = moe("trace", model, *options, "--prompts", 2, "--length", 16)
        assert done.exit_code == 0, done.output
        traced[options] = load_trace(PreparedFiles(model), TRAIN)
    assert [trace.tasks for trace in traced.values()] == [("chat", "report"), ("text",)]
    assert all(trace.prompts == 2 * len(trace.tasks) for trace in traced.values())


def test_a_trace_that_was_interrupted_is_taken_when_it_is_run_again(small: Path, tmp_path: Path):
    """Also with other texts; once a trace is taken, others would not fit it."""
    model, texts = tmp_path / "model", tmp_path / "texts"
    shutil.copytree(small, model, ignore=shutil.ignore_patterns("coserve"))
    texts.mkdir()
    command = ("trace", model, "--texts", texts, "--prompts", 1, "--length", 16)
    (texts / "one.txt").write_text("short")
    assert moe(*command).exit_code == 1
    (texts / "one.txt").write_text("of the board and its parts " * 40)
    for _ in range(2):
        done = moe(*command)
        assert done.exit_code == 0, done.output
    (texts / "two.txt").write_text("another")
    refused = moe(*command)
    assert refused.exit_code == 1
    assert "delete this folder" in refused.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "has no files"), (b"\xff\xfe\xfa", "cannot be read as text"), (b"short", "no prompt of")],
)
def test_texts_that_are_none_are_named(small: Path, tmp_path: Path, content: bytes | None, problem: str):
    model, texts = tmp_path / "model", tmp_path / "texts"
    shutil.copytree(small, model, ignore=shutil.ignore_patterns("coserve"))
    texts.mkdir()
    if content is not None:
        (texts / "one.txt").write_bytes(content)
    done = moe("trace", model, "--texts", texts)
    assert done.exit_code == 1
    assert problem in done.output.replace("\n", " ")


def test_a_side_of_the_benchmark_reports_times_fetches_memory_and_perplexity(small: Path):
    job = SideJob(small, "ondemand", 0.5, (0.0, 1.0), "cpu", judged=1, prompt_tokens=12, new_tokens=3)
    plain, slowed = measure(job)
    positive = ("ttft_p50_ms", "tpot_p95_ms", "tokens_per_s", "blocking_per_token", "moved_mb_per_token", "perplexity")
    assert all(plain[name] > 0 for name in positive)
    assert plain["overlapped_per_token"] == 0
    assert slowed["peak_mb"] is None
    assert "coserve moe unite" in measure(replace(job, side="brownout", options={"way": 2}))
