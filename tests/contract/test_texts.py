"""`generate`, over real sockets: a daemon with a tiny language model beside its experts."""

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contract.client import Line
from tests.contract.odd_daemons import ODD_DAEMON, STEPS, hold_after
from tests.tools.run_commands import coserve

pytest.importorskip("transformers", reason="language models need the extra `moe`")
from tests.tiny_text import CONTEXT, a_text_model

HELD_MODELS = (ODD_DAEMON, "held-models")
MODEL: dict[str, Any] = {
    "checkpoint": "model",
    "mode": "ondemand",
    "memory": "150KB",
    "least_memory": "150KB",
    "max_new_tokens": 40,
    "tasks": ["report", "chat"],
}
LARGE_BYTES, DEVICE_BYTES, LARGE_TEXTS_BYTES = 38_000_000, 112_000_000, 6_000_000
GENERATION = (
    "topic seq at id source model mode task text prompt_tokens new_tokens ttft_ms tpot_ms total_ms status reason"
)
numbers = itertools.count(1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_text_model(tmp_path_factory.mktemp("text") / "model")


@pytest.fixture(scope="module")
def spare(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """Another copy of the same model, for tests to break."""
    return Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("spare") / "model"))


@pytest.fixture(scope="module")
def line(
    tmp_path_factory: pytest.TempPathFactory, torch_experts_folder: Path, checkpoint: Path, spare: Path
) -> Iterator[Line]:
    """Real experts of 45 MB, a model of 38 MB and 6 MB for its texts share 112 MB: one expert beside the model, two if
    it makes way.
    """
    folder = tmp_path_factory.mktemp("texts")
    wide = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 2048}
    models = {name: MODEL | {"checkpoint": str(place)} for name, place in (("tiny", checkpoint), ("spare", spare))}
    large = {"checkpoint": str(a_text_model(folder / "large", **wide)), "mode": "ondemand", "max_new_tokens": 24}
    models["large"] = large | {"memory": LARGE_BYTES, "text_memory": LARGE_TEXTS_BYTES}
    line = Line(folder / "line", torch_experts_folder, command=HELD_MODELS, memory=str(DEVICE_BYTES), models=models)
    with line.service():
        yield line


def generate(prompt: str = "why?", **fields: Any) -> dict[str, Any]:
    header = {"type": "generate", "id": f"text-{next(numbers)}", "source": "mes-1", "model": "tiny"}
    return header | {"prompt": prompt} | fields


def ask(line: Line, header: dict[str, Any]) -> dict[str, Any]:
    with line.peer() as peer:
        return peer.ask(header)


def run(line: Line, command: str, *arguments: str, status: int = 0) -> str:
    return coserve(command, *arguments, "--config", line.config, status=status).output


def status_of(line: Line, model: str) -> dict[str, Any]:
    return next(row for row in line.status()["models"] if row["name"] == model)


def made(line: Line, **fields: Any) -> dict[str, Any]:
    """The published result of a request that must be accepted."""
    header = generate(**fields)
    answer = ask(line, header)
    assert answer["type"] == "accepted", answer
    return line.result(header["id"])


def test_a_text_is_generated_and_its_row_says_how(line: Line) -> None:
    result = made(line, prompt="what failed?", max_new_tokens=6, task="report", board={"type": "free", "serial": "T"})
    assert set(result) == set(GENERATION.split())
    assert (result["status"], result["reason"], result["model"], result["mode"], result["task"]) == (
        "done", None, "tiny", "ondemand", "report",
    )  # fmt: skip
    assert (result["prompt_tokens"], result["new_tokens"]) == (12, 6)
    assert 0 < result["ttft_ms"] <= result["total_ms"]
    assert result["tpot_ms"] > 0
    ((fetches, hit_rate, threshold, board),) = line.rows(
        "SELECT expert_fetches, predictor_hit_rate, brownout_threshold, board_id FROM generations WHERE seq = ?",
        result["seq"],
    )
    assert fetches > 0
    assert 0 < hit_rate < 1
    assert (threshold, board) == (None, None)


def test_tokens_are_streamed_in_order_and_add_up_to_the_text_that_follows(line: Line) -> None:
    header = generate(stream=True, max_new_tokens=12, source="mes:2")
    with line.listener("token/mes:2/", "generation/mes:2/", "heartbeat/") as listener:
        listener.until_heartbeat()
        assert ask(line, header)["type"] == "accepted"
        pieces: list[dict[str, Any]] = []
        while True:
            topic, body = listener.take()
            if topic == "generation/mes:2/":
                break
            if topic != "heartbeat/":
                assert topic == "token/mes:2/"
                pieces.append(body)
    assert all(set(piece) == {"seq", "at", "id", "source", "index", "text"} for piece in pieces)
    assert [piece["index"] for piece in pieces] == list(range(12))
    assert "".join(piece["text"] for piece in pieces) == body["text"]
    assert {piece["seq"] for piece in pieces} == {body["seq"] - 1}


@pytest.mark.promise("Language models", "A request that can never be served is rejected with its reason")
@pytest.mark.parametrize(
    ("wrong", "code", "says"),
    [
        ({"model": "tini"}, "unknown_model", "names no model 'tini'"),
        ({"prompt": ""}, "bad_field", "prompt: the prompt is empty"),
        ({"prompt": "x" * CONTEXT}, "bad_field", f"the prompt has {CONTEXT} tokens, at most {CONTEXT - 1} fit"),
        ({"task": "poetry"}, "bad_field", "task: model tiny knows report, chat"),
        ({"max_new_tokens": 41}, "bad_field", "gives at most 40"),
        ({"board": {"type": "none", "serial": "S"}}, "unknown_board", "none"),
    ],
)
def test_what_can_never_be_generated_is_rejected_by_name(
    line: Line, wrong: dict[str, Any], code: str, says: str
) -> None:
    answer = ask(line, generate() | wrong)
    assert (answer["type"], answer["code"]) == ("rejected", code)
    assert says in answer["reason"]


@pytest.mark.promise(
    "Language models",
    "A request for text that was answered `accepted` gets exactly one result, across a kill, a stop, and a "
    "configuration that lost its model",
)
def test_a_kill_a_stop_and_a_lost_model_leave_every_accepted_text_with_exactly_one_result(
    tmp_path: Path, torch_experts_folder: Path, checkpoint: Path
) -> None:
    tiny = MODEL | {"checkpoint": str(checkpoint)}
    line = Line(tmp_path / "line", torch_experts_folder, command=HELD_MODELS, models={"tiny": tiny, "spare": tiny})

    def accept(count: int, **fields: Any) -> list[dict[str, Any]]:
        headers = [generate(f"prompt {number}", max_new_tokens=40, **fields) for number in range(count)]
        with line.peer() as peer:
            for header in headers:
                peer.send(header)
            assert {peer.take()["type"] for _ in headers} == {"accepted"}
        return headers

    service = line.service()
    hold_after(56, line.folder)  # the first of twelve has its 40 tokens by then, and the last does not
    service.start()
    killed = accept(12, stream=True)
    line.wait(lambda: line.rows("SELECT count(*) FROM generations WHERE seq IS NOT NULL")[0][0] >= 1)
    service.kill()
    before = dict(line.rows("SELECT request_id, text FROM generations WHERE seq IS NOT NULL"))
    assert len(before) < len(killed)

    (line.folder / STEPS).unlink()
    service.start()
    line.idle()
    assert [message["seq"] for message in line.stream()] == list(range(1, 13))
    assert ask(line, killed[0])["differs"] is False
    hold_after(0, line.folder)
    stopped = accept(8)
    lost = accept(8, model="spare")
    assert service.stop() == 0
    assert line.rows("SELECT count(*) FROM generations WHERE status = 'accepted'") == [(16,)]

    (line.folder / STEPS).unlink()
    text = line.config.read_text(encoding="utf-8")
    line.config.write_text(text.replace("spare:", "other:"), encoding="utf-8")
    with line.service():
        line.idle()
        stream = line.stream()
        assert ask(line, generate(model="spare"))["code"] == "unknown_model"
    assert [message["seq"] for message in stream] == list(range(1, 29))
    after = {message["id"]: message for message in stream}
    assert {name: after[name]["text"] for name in before} == before
    assert {after[header["id"]]["status"] for header in (*killed, *stopped)} == {"done"}
    assert {after[header["id"]]["reason"] for header in lost} == {"unknown_model"}
    assert line.rows("SELECT count(*) FROM generations WHERE status = 'accepted'") == [(0,)]


@pytest.mark.promise(
    "Language models",
    "A removed or damaged checkpoint costs its own requests only; images and other models continue, and it "
    "serves again when it is restored",
)
def test_a_model_that_is_removed_damaged_or_put_back_costs_its_own_requests_only(
    line: Line, spare: Path, checkpoint: Path
) -> None:
    weights = spare / "model.safetensors"

    def ask_spare() -> dict[str, Any]:
        return made(line, model="spare", prompt="hello", max_new_tokens=4)

    def spare_says() -> str:
        return status_of(line, "spare")["last_error"] or ""

    text = ask_spare()["text"]
    moved = spare.rename(spare.with_name("elsewhere"))
    result = ask_spare()
    assert (result["status"], result["reason"]) == ("unknown", "model_failed")
    line.wait(lambda: status_of(line, "spare")["state"] == "failed")  # it closes what it has after it told of it
    assert str(spare) in spare_says()
    assert line.status()["state"] == "degraded"
    assert line.result(line.send())["verdict"] == "pass"
    assert made(line, prompt="hello", max_new_tokens=4)["text"] == text
    moved.rename(spare)
    line.wait(lambda: ask_spare()["text"] == text)
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    assert ask_spare()["reason"] == "model_failed"
    line.wait(lambda: ask_spare()["reason"] == "model_failed" and "truncated" in spare_says())
    assert line.result(line.send())["verdict"] == "pass"
    shutil.copy(checkpoint / "model.safetensors", weights)
    line.wait(lambda: ask_spare()["text"] == text)
    line.wait(lambda: line.status()["state"] == "ready")


def test_a_board_is_explained_by_the_template_or_by_the_model_that_is_configured(line: Line) -> None:
    named = {"type": "named", "serial": "B-1", "lot": "L42"}
    for component, designator in (("P", "P1"), ("P", "P2"), ("F", "F1")):
        line.send(board=named, component=component, designator=designator)
    (board,) = line.boards("B-1")
    assert board["verdict"] == "fail"
    text = run(line, "report", "B-1", "--template")
    assert "Board B-1 (named, lot L42), attempt 1 of 1, FAILED: 3 of 3 positions inspected." in text
    assert "- F1 (F) failed: missing_void; QFP64 saw " in text
    written = json.loads(run(line, "report", "B-1", "--wait", "90", "--json"))
    assert (written["by"], written["why_not_the_model"], written["verdict"]) == ("large", None, "fail")
    ((text, status, serial),) = line.rows(
        "SELECT text, g.status, serial FROM generations AS g JOIN boards USING (board_id) WHERE g.source = 'report'"
    )
    assert (written["text"], status, serial) == (text.strip(), "done", "B-1")
    assert "(written by model large; the rows say:)" in run(line, "report", "B-1", "--wait", "90", "--model", "large")
    assert "no board with serial B-9 in the results" in run(line, "report", "B-9", status=1)
    assert "no attempt 2 at board B-1" in run(line, "report", "B-1", "--attempt", "2", status=1)
    assert "names no model reader: " in run(line, "report", "B-1", "--model", "reader", status=2)


@pytest.mark.promise("Language models", "A report falls back to the template and says so")
def test_a_report_falls_back_to_the_template_and_says_why(line: Line) -> None:
    """After the test above: a prompt that is too long for a model, a line that drains, and no daemon."""
    short = run(line, "report", "B-1", "--model", "tiny")
    assert short.startswith("Board B-1")
    assert "(by the template: model tiny: the daemon refused it: prompt: the prompt has " in short
    line.control("drain")
    assert "model large: the daemon refused it: the line is draining" in run(line, "report", "B-1")
    line.control("drain", off=True)
    text = line.config.read_text(encoding="utf-8")
    no_daemon = line.config.with_name("no-daemon.yaml")
    no_daemon.write_text(text.replace("run/intake.sock", "run/no-daemon.sock"), encoding="utf-8")
    done = coserve("report", "B-1", "--wait", 0.3, "--json", "--config", no_daemon)
    fallen_back = json.loads(done.output)
    assert (fallen_back["by"], fallen_back["text"].startswith("Board B-1")) == ("template", True)
    assert "no daemon answers" in fallen_back["why_not_the_model"]
    settings = {name: value for name, value in yaml.safe_load(text).items() if name != "models"}
    no_daemon.write_text(yaml.safe_dump(settings), encoding="utf-8")
    done = coserve("report", "B-1", "--config", no_daemon)
    assert f"(by the template: {no_daemon} names no language model)" in done.output.replace("\n", " ")
