"""The examples in C++ and Node, and coserve_client, at a daemon that is busy, is killed and comes back."""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from daemon.wire.control import ask
from tests import ROOT
from tests.contract.client import Line
from tests.lines import a_jpeg, a_line
from tests.simulated import a_service
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.test_all

EXAMPLES = ROOT / "tools/camera/examples"
STRICT = ("-Wall", "-Wextra", "-Werror", "-pedantic")
IMAGES = 60
MAX_BYTES = 1_000_000
CREDIT = 4
RULES = """\
boards:
  open-board: {components: {R0402: 1000}}
classifiers:
  "*": {expert: "{component}", pass: [ok, odd, bad], review_below: 0.0}
"""


PYTHON_PUBLISH = """\
import json, sys
from pathlib import Path
from coserve_client import CameraImage, Publisher, publish_images

def image_of(path):
    designator, component = path.stem.split(".")
    board = {"type": path.parent.parent.name, "serial": path.parent.name}
    return CameraImage(f"{path.parent.name}/{designator}", path.read_bytes(), board, component)

endpoint, source, folder = sys.argv[1:]
with Publisher(endpoint, source) as publisher:
    account = publish_images(publisher, map(image_of, sorted(Path(folder).glob("*/*/*.jpg"))))
print(*account.refusals, sep="\\n", file=sys.stderr)
print(json.dumps(account.as_dict() | {"rejected": account.rejected.total()}))
sys.exit(not account.complete)
"""
PYTHON_RESULTS = """\
import json, sys
from coserve_client import Results

intake, stream, first, last = sys.argv[1:]
with Results(stream, intake, since=int(first)) as results:
    while results.seq < int(last):
        print(json.dumps(results.take()))
"""


@dataclass(frozen=True, slots=True)
class Language:
    """The commands of its two programs."""

    publish: list[str]
    results: list[str]


def cpp(folder: Path) -> Language | str:
    """The compiled programs, or what is missing."""
    if shutil.which("g++") is None:
        return "no g++ here: apt-get install g++"
    for header, package in (("zmq.hpp", "cppzmq-dev"), ("nlohmann/json.hpp", "nlohmann-json3-dev")):
        if not Path("/usr/include", header).exists():
            return f"no {header} here: apt-get install {package}"
    compilers = []
    for name in ("publish", "results"):
        source = EXAMPLES / "cpp" / f"{name}.cpp"
        (command,) = re.findall(rf"^//   (g\+\+ .* -o {name})$", source.read_text(encoding="utf-8"), re.MULTILINE)
        words = [*command.replace("-O2", "-O0").split(), *STRICT]
        words[words.index(f"{name}.cpp")], words[words.index(name)] = str(source), str(folder / name)
        compilers.append(subprocess.Popen(words, stderr=subprocess.PIPE, text=True))
    for compiler in compilers:
        _, message = compiler.communicate(timeout=600)
        assert (compiler.returncode, message) == (0, ""), message
    return Language([str(folder / "publish")], [str(folder / "results")])


def node(folder: Path) -> Language | str:
    """The programs with their library installed, or what is missing."""
    npm, program = shutil.which("npm"), shutil.which("node")
    if npm is None or program is None:
        return "no npm or node here: apt-get install nodejs npm"
    copy = folder / "node"
    shutil.copytree(EXAMPLES / "node", copy, ignore=shutil.ignore_patterns("node_modules"))
    install = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(install, cwd=copy, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        return f"zeromq cannot be had from npm here: {done.stderr.strip()[:200]}"
    return Language([program, str(copy / "publish.js")], [program, str(copy / "results.js")])


def python(_folder: Path) -> Language | str:
    """The programs above."""
    return Language([sys.executable, "-c", PYTHON_PUBLISH], [sys.executable, "-c", PYTHON_RESULTS])


@pytest.fixture(scope="module")
def languages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Language | str]:
    return {make.__name__: make(tmp_path_factory.mktemp(make.__name__)) for make in (cpp, node, python)}


def a_folder(root: Path) -> Path:
    """Two boards, an image that is none, one that is too large, and a file that is not meant."""
    for number in range(IMAGES):
        path = root / "open-board" / f"S{number % 2}" / f"R{number}.R0402.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(a_jpeg(number))
    path.with_name("R998.R0402.jpg").write_bytes(b"no image")
    path.with_name("R999.R0402.jpg").write_bytes(bytes(MAX_BYTES + 1))
    path.with_name("notes.txt").write_bytes(b"not for us")
    return root


@dataclass(slots=True)
class Ran:
    """The output of one language's publisher and consumer, and of the publisher that sent everything a second time."""

    status: int
    account: dict[str, int]
    complaints: str
    again: dict[str, int]
    messages: list[dict[str, Any]]


@dataclass(slots=True)
class Scene:
    """Both languages at one daemon, which was busy, was killed and came back: what each said, and what was stored."""

    ran: dict[str, Ran]
    images: list[tuple[str, str, int]]
    order: list[tuple[str, str]]


def busy_answers(control: str) -> float:
    text = ask(control, "metrics", timeout_s=PATIENCE_S)["text"]
    match = re.search(r'^coserve_intake_answers_total\{type="busy"\} (\S+)$', text, re.MULTILINE)
    return float(match[1]) if match else 0.0


@pytest.fixture(scope="module")
def scene(
    languages: dict[str, Language | str], tmp_path_factory: pytest.TempPathFactory, experts_folder: Path
) -> Scene:
    usable = {name: language for name, language in languages.items() if isinstance(language, Language)}
    folder = tmp_path_factory.mktemp("scene")
    line = folder / "line"
    config = a_line(line, experts_folder, memory="300MB", limits={"max_payload_bytes": MAX_BYTES, "credit": CREDIT})
    (line / "rules.yaml").write_text(RULES, encoding="utf-8")
    pictures = str(a_folder(folder / "pictures"))
    intake, results, control = (f"ipc://{line}/run/{name}.sock" for name in ("intake", "results", "control"))
    last_seq = str(IMAGES * len(usable))  # one message an image: no board is ever complete
    service = a_service(config, folder / "daemon.log")
    service.start()
    ask(control, "drain", timeout_s=PATIENCE_S)

    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    consumers = {name: start(*language.results, intake, results, "0", last_seq) for name, language in usable.items()}
    publishers: dict[str, subprocess.Popen[str]] = {}
    ran: dict[str, Ran] = {}
    try:
        for name, language in reversed(usable.items()):  # the one that starts slowly first
            before = busy_answers(control)
            publishers[name] = start(*language.publish, intake, name, pictures)
            # So many may still go to one that was stopped.
            until(lambda before=before: busy_answers(control) > before + CREDIT)
            publishers[name].send_signal(signal.SIGSTOP)  # what is answered from now on goes to the next one
            os.waitpid(publishers[name].pid, os.WUNTRACED)
        for publisher in publishers.values():
            publisher.send_signal(signal.SIGCONT)
        service.kill()
        service.start()
        for name, language in usable.items():
            output, complaints = publishers[name].communicate(timeout=PATIENCE_S)
            again = start(*language.publish, intake, name, pictures).communicate(timeout=PATIENCE_S)[0]
            ran[name] = Ran(publishers[name].returncode, json.loads(output), complaints, json.loads(again), [])
        for name, hearer in consumers.items():
            ran[name].messages = [json.loads(text) for text in hearer.communicate(timeout=PATIENCE_S)[0].splitlines()]
    finally:
        for process in (*publishers.values(), *consumers.values()):
            process.kill()
            process.communicate()
        service.stop()
    with closing(sqlite3.connect(f"file:{line}/inspection.db?mode=ro", uri=True)) as database:
        images = database.execute("SELECT source, image_id, count(*) FROM inspections GROUP BY 1, 2").fetchall()
        order = database.execute("SELECT source, image_id FROM inspections ORDER BY seq").fetchall()
    return Scene(ran, images, order)


@pytest.fixture(params=["cpp", "node", "python"])
def name(request: pytest.FixtureRequest, languages: dict[str, Language | str]) -> str:
    if isinstance(missing := languages[request.param], str):
        pytest.skip(missing)
    return request.param


@pytest.mark.promise(
    "Cameras",
    "500 images through five kills of the daemon, and kills of the camera: each has one row, and none that was "
    "spooled or accepted is lost",
)
def test_every_image_arrives_once_through_busy_a_kill_and_a_second_run(scene: Scene, name: str) -> None:
    ran = scene.ran[name]
    assert ran.status == 1, "two were refused"
    assert "R998: bad_image: the payload is not a JPEG, PNG, BMP or TIFF image" in ran.complaints
    first, again = ran.account, ran.again
    assert "R999: too_large: " in ran.complaints
    assert first["sent"] == IMAGES + 2
    assert (first["accepted"] + first["duplicate"], first["rejected"]) == (IMAGES, 2)
    assert first["busy"] > 0
    assert first["resent"] > 0
    assert (again["accepted"], again["duplicate"], again["rejected"]) == (0, IMAGES, 2)
    counts = [count for source, _, count in scene.images if source == name]
    assert counts == [1] * IMAGES


@pytest.mark.promise(
    "Cameras",
    "A consumer in another language receives every result once and in order, across a restart",
)
def test_every_result_is_heard_once_and_in_order_across_the_restart(scene: Scene, name: str) -> None:
    messages = scene.ran[name].messages
    assert [message["seq"] for message in messages] == list(range(1, len(scene.order) + 1))
    assert [(message["source"], message["id"]) for message in messages] == scene.order


@pytest.mark.parametrize("name", ["cpp", "node"], indirect=True)
def test_a_restored_database_is_read_from_its_beginning(
    languages: dict[str, Language | str], name: str, tmp_path: Path, experts_folder: Path
) -> None:
    """Once by a consumer that heard it, and once by one that was away and gives its position with the epoch."""
    language = languages[name]
    assert isinstance(language, Language)
    line = Line(tmp_path / "line", experts_folder)
    service = line.service()

    def judge(count: int) -> None:
        for _ in range(count):
            line.send()
        line.idle()

    def stored() -> list[str]:
        return [image for (image,) in line.rows("SELECT image_id FROM inspections ORDER BY seq")]

    service.start()
    judge(2)
    files = tmp_path / "older.db", line.folder / "inspection.db"
    with closing(sqlite3.connect(files[0])) as older, closing(sqlite3.connect(files[1])) as database:
        database.backup(older)
    judge(3)
    hearer = subprocess.Popen(
        [*language.results, line.intake, line.results, "0", "6"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert hearer.stdout is not None
        assert hearer.stderr is not None
        first = [json.loads(hearer.stdout.readline())["id"] for _ in range(5)]
        assert first == stored()
        epoch = line.status()["epoch"]
        service.stop()
        for file in line.folder.glob("inspection.db*"):
            file.unlink()
        shutil.copyfile(tmp_path / "older.db", line.folder / "inspection.db")
        service.start()
        assert hearer.stderr.readline().split()[1].startswith(epoch)
        assert hearer.stderr.readline().split()[1].startswith(line.status()["epoch"])
        judge(4)
        heard = [json.loads(text)["id"] for text in hearer.communicate(timeout=PATIENCE_S)[0].splitlines()]
        away = subprocess.run(
            [*language.results, line.intake, line.results, f"5@{epoch}", "6"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
    finally:
        hearer.kill()
        service.stop()
    assert heard[-6:] == stored()
    assert [json.loads(text)["id"] for text in away.stdout.splitlines()] == stored()
