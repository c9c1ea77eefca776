"""The fixture, its text, its traces and its measurements, made very small."""

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from experts.moe.errors import ModelError
from experts.moe.trace import load_popularity, load_trace
from experts.moe.weights.prepared import HELD_OUT, TRAIN, PreparedFiles

pytest.importorskip("transformers", reason="needs the extra `moe`")

from experts.moe.library import transformers
from tests.moe.bench import BenchCell, draw_times
from tests.moe.evaluate import decode_timing, held_out_prompts, perplexity
from tests.moe.fixture import FixtureRecipe, make_fixture
from tests.moe.side import SideJob, measure
from tools.cli.main import app
from tools.moe.checkpoint import open_runtime
from tools.moe.corpus import DOMAINS, CorpusDocument, collect
from tools.moe.text import encode, load_text, read_tokenizer
from tools.moe.trace import take_traces

SMALL = replace(
    FixtureRecipe(),
    layers=2,
    width=32,
    experts=4,
    vocabulary=320,
    characters=40_000,
    window=32,
    windows_of_domain=1,
    steps=4,
)


@pytest.fixture(scope="module")
def documents() -> list[CorpusDocument]:
    return collect(SMALL.characters)


@pytest.fixture(scope="module")
def small(documents: list[CorpusDocument], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("moe") / "fixture"
    assert make_fixture(out, SMALL, documents)
    return out


def test_an_existing_fixture_is_not_made_again(small: Path):
    assert not make_fixture(small, SMALL)
    assert not small.with_name("fixture.part").exists()


def test_no_file_is_on_both_sides(small: Path):
    rows = json.loads((small / "coserve/text/corpus.json").read_text())
    assert {row["domain"] for row in rows} == set(DOMAINS)
    sides: dict[str, set[bool]] = {}
    for row in rows:
        sides.setdefault(row["source"], set()).add(row["held_out"])
    assert all(len(side) == 1 for side in sides.values())
    assert {True, False} == set.union(*sides.values())


def test_text_ends_each_file_and_pieces_do_not_overlap(small: Path):
    tokenizer = transformers().AutoTokenizer.from_pretrained(small)
    documents = [
        CorpusDocument("licence", f"{name}.txt", f"free as in {name} " * 40) for name in ("air", "beer", "speech")
    ]
    text = encode([each for each in documents if not each.held_out], tokenizer, held_out=False)
    ends = (text.start["licence"][1:] - 1).tolist()
    assert ends
    assert all(text.ids["licence"][end] == tokenizer.eos_token_id for end in ends)
    pieces = text.windows("licence", 16, 5)
    assert len({tuple(piece.tolist()) for piece in pieces}) > 1
    assert text.windows("python", 16, 5).shape == (0, 16)


def test_traces_hold_the_choices_of_the_unmodified_models_gates(small: Path):
    take_traces(small, prompts=2, length=16)
    prepared = PreparedFiles(small)
    trace = load_trace(prepared, TRAIN)
    assert trace.tasks == DOMAINS
    assert (trace.prompts, len(trace.token)) == (10, 160)
    assert trace.decode[trace.span(3)].tolist() == [False] * 8 + [True] * 8
    model = transformers().AutoModelForCausalLM.from_pretrained(small).eval()
    ids = trace.token[trace.span(3)].long()[None]
    with torch.no_grad():
        gates = model.model(ids, output_router_logits=True).router_logits
    for layer, logits in enumerate(gates):
        weight, index = logits.float().softmax(-1).topk(2)
        assert torch.equal(trace.index[trace.span(3), layer].long(), index)
        expected = (weight / weight.sum(-1, keepdim=True)).to(torch.float16)
        assert torch.allclose(trace.weight[trace.span(3), layer], expected, atol=1e-3)
    assert load_trace(prepared, HELD_OUT).prompts == 5
    overall, of_task = load_popularity(prepared)
    assert overall.sum(-1).tolist() == pytest.approx([1.0, 1.0])
    assert tuple(of_task) == DOMAINS


def test_perplexity_is_that_of_the_unmodified_model_whole_or_token_by_token(small: Path):
    prompts = held_out_prompts(small, of_domain=1, length=24)
    model = transformers().AutoModelForCausalLM.from_pretrained(small).eval()
    with torch.no_grad():
        losses = [model(each.ids[None], labels=each.ids[None]).loss for each in prompts]
    expected = torch.stack(losses).mean().exp().item()
    with closing(open_runtime(small, "ondemand", share=0.5)) as runtime:
        whole = perplexity(runtime, prompts)
        decoded = perplexity(runtime, prompts, decoded=8)
    assert whole.perplexity == pytest.approx(expected, rel=1e-4)
    assert decoded.perplexity == pytest.approx(expected, rel=1e-4)
    assert set(whole.of_domain) <= set(DOMAINS)
    assert whole.counts.fetches > 0


def test_timing_counts_a_first_token_for_each_prompt_and_the_others_between(small: Path):
    prompts = held_out_prompts(small, of_domain=1, length=12)
    with closing(open_runtime(small, "ondemand", share=0.5)) as runtime:
        timing = decode_timing(runtime, prompts, new_tokens=3)
    assert (len(timing.first_s), len(timing.between_s)) == (len(prompts), 2 * len(prompts))
    assert timing.decode.served < timing.counts.served
    assert load_text(PreparedFiles(small), "text/heldout").ids["python"].numel() > 0


def a_job(checkpoint: Path, side: str, links_ms: tuple[float, ...] = (0.0,), **changes: Any) -> SideJob:
    fields = {"share": 0.5, "device": "cpu", "prompts": 1, "prompt_tokens": 12, "new_tokens": 3, "judged": 0} | changes
    return SideJob(checkpoint=checkpoint, side=side, links_ms=links_ms, **fields)


def test_a_side_reports_times_fetches_memory_and_perplexity(small: Path):
    report = measure(a_job(small, "ondemand", (0.0, 1.0), judged=1))
    assert report.error is None
    plain, slowed = report.runs
    assert (plain.link_ms, slowed.link_ms) == (0.0, 1.0)
    figures = plain.figures
    positive = ("ttft_p50_ms", "tpot_p95_ms", "tokens_per_s", "blocking_per_token", "moved_mb_per_token", "perplexity")
    assert all((figures[name] or 0) > 0 for name in positive)
    assert figures["overlapped_per_token"] == 0
    assert figures["all_predicted"] is None


def test_a_side_that_lacks_a_part_says_which_command_makes_it(small: Path):
    report = measure(a_job(small, "brownout", options={"way": 2}))
    assert report.error is not None
    assert "coserve moe unite" in report.error


def test_a_tokenizer_that_cannot_be_read_is_named(small: Path, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="its tokenizer cannot be read"):
        read_tokenizer(tmp_path)


def test_the_times_of_every_mode_that_was_measured_are_drawn(tmp_path: Path):
    figures: dict[str, float | None] = {"tpot_p50_ms": 4.0, "tpot_p95_ms": 6.0}
    cells = [BenchCell(side, 0.5, link_ms, {}, figures) for side in ("lookahead", "duoserve") for link_ms in (0.0, 2.0)]
    failed = BenchCell("emoe", 0.5, 0.0, error="not made yet")
    file = draw_times([*cells, failed], tmp_path)
    assert file is not None
    assert file.read_bytes().startswith(b"\x89PNG")
    assert draw_times([failed], tmp_path) is None


def test_a_bench_without_text_or_of_an_unknown_side_says_what_to_do(small: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(small, copy, ignore=shutil.ignore_patterns("coserve"))
    for arguments, reason in (([str(copy)], "coserve moe"), ([str(small), "--side", "fast"], "sides are resident")):
        done = CliRunner().invoke(app, ["moe", "bench", *arguments])
        assert done.exit_code
        assert reason in done.stderr
        assert "Traceback" not in done.stderr
