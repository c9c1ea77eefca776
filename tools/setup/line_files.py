"""A new line: the five answers that `coserve init` needs, and its files, commented for what a person will change."""

import json
import re
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template
from typing import Any, Literal, TypeVar

import psutil
import typer
import yaml

from daemon.config.plant_time import zone_of_this_pc
from daemon.host.folders import make_folder
from daemon.units import parse_bytes, parse_seconds, printable, size_text
from routing_rules.document import read_yaml_text
from routing_rules.schema import MAX_NAME, is_name
from tools.setup.doctor import Gpu, find_driver
from tools.terminal.console import CommandError, as_typed, fail

#: One board type: component types with a quantity, or with their designators.
Components = dict[str, int | list[str]]
Dashboard = Literal["no", "here", "network"]
Answer = TypeVar("Answer")

EXAMPLE_BOARD = "mainboard-a R0402=4 C0603=C1,C2"
EVER = "ever"
_GPU_SHARE = 0.8
_LEAST_BYTES = 5 * 10**6
_ROUND_BYTES = 100 * 10**6
_FREE_SHARE = 10
_FREE_BYTES = 10 * 10**9


class AnswerError(CommandError):
    """An unusable answer; the text says what is expected."""

    status = 2


@dataclass(frozen=True, slots=True)
class Answers:
    """All five answers, parsed. `memory` is bytes by device; `keep` None keeps images without limit."""

    boards: Mapping[str, Components]
    data: Path
    memory: Mapping[str, int]
    dashboard: Dashboard
    keep: str | None


def parse_board(text: str) -> tuple[str, Components]:
    """Parse `mainboard-a R0402=180 QFP64=U1,U2`: the board type, then each component type with how many or which."""
    if not text.split():
        raise AnswerError(f"expected a board such as: {EXAMPLE_BOARD}")
    name, *parts = text.split()
    components: Components = {}
    for part in parts:
        component, equals, amount = part.rpartition("=")
        if not equals or not component or not amount:
            raise AnswerError(f"expected COMPONENT=QUANTITY or COMPONENT=R1,R2, such as R0402=180, not {part!r}")
        if component in components:
            raise AnswerError(f"{component} is there twice: name each component type once")
        if amount.isdecimal() and int(amount) < 1:
            raise AnswerError(f"{component}: a board has at least 1 of a component type that is inspected")
        components[component] = int(amount) if amount.isdecimal() else _designators(component, amount)
    if not components:
        raise AnswerError(f"{name}: which components? Such as: {EXAMPLE_BOARD}")
    return name, components


def _designators(component: str, amount: str) -> list[str]:
    names = list(dict.fromkeys(filter(None, amount.split(","))))
    odd = [name for name in names if not is_name(name)]
    if odd or not names:
        raise AnswerError(
            f"{component}={amount}: expected how many there are, or designators of 1 to {MAX_NAME} characters, such as"
            f" {component}=4 or {component}=R1,R2{f', not {odd[0]!r}' if odd else ''}"
        )
    return names


def parse_folder(text: str) -> Path:
    """Parse a folder; refuse an answer to the question about boards."""
    if not text.strip():
        raise AnswerError("expected a folder such as data")
    if "=" in text and " " in text.strip():
        raise AnswerError(
            f"{text!r} looks like a board type and its components, not like a folder such as data: more board types"
            " go into rules.yaml, or each into a --board"
        )
    return Path(text).expanduser()


def boards_in(folder: Path) -> dict[str, Components]:
    """Return the board types of sample images FOLDER/BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png, with designators."""
    from tools.camera.layout import PictureFiles  # OpenCV comes with it
    from tools.pictures import find_pictures
    from tools.terminal.names import legal_name

    if not folder.is_dir():
        raise AnswerError(f"no folder {folder}")
    boards: dict[str, dict[str, set[str]]] = {}
    for path in find_pictures(folder).files:
        if names := PictureFiles().part_of(path.relative_to(folder)):
            board, _, designator, component = (legal_name(name, path) for name in names)
            boards.setdefault(board, {}).setdefault(component, set()).add(designator)
    if not boards:
        raise AnswerError(f"{folder} holds no image named BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png; or use --board")
    return {
        board: {component: sorted(names, key=_natural) for component, names in sorted(components.items())}
        for board, components in sorted(boards.items())
    }


def _natural(text: str) -> list[tuple[int, str]]:
    """Sort R2 before R10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def parse_boards(text: str) -> dict[str, Components]:
    if Path(text).expanduser().is_dir():
        return boards_in(Path(text).expanduser())
    return dict([parse_board(text)])


def parse_memory(text: str, devices: Sequence[str]) -> dict[str, int]:
    """Parse `2GB` for the first of `devices`, or `cuda:0=6GB cpu=2GB`."""
    memory: dict[str, int] = {}
    for part in text.replace(",", " ").split():
        device, equals, size = part.rpartition("=")
        name = device if equals else devices[0]
        if re.fullmatch(r"cpu|cuda:\d+", name) is None:
            raise AnswerError(f"expected cpu or cuda:0, cuda:1, … before the size, not {name!r}")
        try:
            memory[name] = parse_bytes(size)
        except ValueError as error:
            raise AnswerError(str(error)) from None
        if memory[name] < _LEAST_BYTES:
            raise AnswerError(f"{part} holds no expert (a ResNet-18 has 45 MB): a size such as 2GB")
    if not memory:
        raise AnswerError("expected a size such as 2GB")
    return memory


def parse_dashboard(text: str) -> Dashboard:
    match text.strip().lower():
        case "no" | "here" | "network" as answer:
            return answer
        case _:
            raise AnswerError(f"expected no, here or network, not {text.strip()!r}")


def parse_keep(text: str) -> str | None:
    """Return a duration such as `90d` as written; None for `ever`."""
    answer = text.strip()
    if answer.lower() == EVER:
        return None
    try:
        kept_s = parse_seconds(answer.lower())
    except ValueError:
        raise AnswerError(f"expected a duration such as 90d, 12h or 1y, not {answer!r}; or {EVER}") from None
    if kept_s <= 0:
        raise AnswerError("expected a duration above 0, such as 90d")
    return answer.lower()


def proposed_memory(gpus: Sequence[Gpu]) -> dict[str, int]:
    """Return four fifths of each GPU; without one, half of the RAM, at most three quarters of what is free."""
    if gpus:
        return {f"cuda:{number}": _rounded(gpu.total_bytes * _GPU_SHARE) for number, gpu in enumerate(gpus)}
    ram = psutil.virtual_memory()
    return {"cpu": _rounded(min(ram.total / 2, ram.available * 3 / 4))}


def _rounded(size: float) -> int:
    return max(_ROUND_BYTES, int(size) // _ROUND_BYTES * _ROUND_BYTES)


def free_floor(folder: Path) -> int:
    """Return the value for `retention.free`: 10 GB, or a tenth of a smaller disk."""
    present = next(path for path in (folder, *folder.parents) if path.is_dir())
    return min(_FREE_BYTES, _rounded(psutil.disk_usage(str(present)).total / _FREE_SHARE))


def size(count: int) -> str:
    """Return bytes as the configuration writes them: 2.5GB, 300MB."""
    return size_text(count).replace(".0 ", "").replace(" ", "")


def ask(text: str, proposal: str, parse: Callable[[str], Answer], option: str | None, *, is_silent: bool) -> Answer:
    """Return the option; else the proposal off a terminal; else ask until the answer can be used."""
    if option is not None or is_silent:
        return parse(proposal if option is None else option)

    def checked(typed: str) -> Answer:
        try:
            return parse(typed)
        except AnswerError as error:
            raise typer.BadParameter(printable(str(error))) from None

    try:
        return typer.prompt(text, default=proposal, value_proc=checked)
    except typer.Abort:
        if sys.stdin is not None and sys.stdin.isatty():
            raise
        typer.echo()
        way = f"answer by options ({as_typed('init --help')}), or take the proposals with --yes"
        fail(f"nobody can answer here: {way}", status=2)


def collect_answers(
    board: Sequence[str] | None,
    images: Path | None,
    data: Path | None,
    memory: str | None,
    dashboard: str | None,
    keep: str | None,
    *,
    is_silent: bool,
) -> Answers:
    """Return all answers, from options or by asking. Raises AnswerError."""
    ask_for = partial(ask, is_silent=is_silent)
    if images is not None:
        boards = boards_in(images)
    elif board:
        boards = dict(map(parse_board, board))
    else:
        question = "1/5 A board type and its components (more: in rules.yaml, or --board), or a folder of sample images"
        boards = ask_for(question, EXAMPLE_BOARD, parse_boards, None)
    folder = None if data is None else str(data)
    driver = find_driver()
    gpus, ram = driver.gpus if driver else (), psutil.virtual_memory()
    proposed = proposed_memory(gpus)
    sizes = [f"{gpu.name} with {size(gpu.total_bytes)}" for gpu in gpus]
    sizes.append(f"{size(_rounded(ram.total))} of RAM, {size(_rounded(ram.available))} free")
    proposal = " ".join(f"{device}={size(budget)}" for device, budget in proposed.items())
    return Answers(
        boards,
        ask_for("2/5 Where images and results lie", "data", parse_folder, folder),
        ask_for(
            f"3/5 Memory for experts (this PC has {', '.join(sizes)})",
            proposal,
            lambda typed: parse_memory(typed, list(proposed)),
            memory,
        ),
        ask_for("4/5 Dashboard: no, here (this PC), network (with a token)", "here", parse_dashboard, dashboard),
        ask_for("5/5 How long images of failed boards stay: 90d, 1y, ever", "90d", parse_keep, keep),
    )


#: Ports for cameras, results and the dashboard; a line beside another takes the same ones plus 10, 20, ….
_PORTS = (5570, 5571, 9470)
TOKEN = Path("keys/http_token")
CATALOG = Path("experts/catalog.yaml")
_SECRET_MODE = 0o600
_HTTP_HOSTS = {"here": "127.0.0.1", "network": "0.0.0.0"}  # noqa: S104 - asked for, and behind a token


def write_line(folder: Path, answers: Answers) -> list[Path]:
    """Write missing files and return them. Raises FileExistsError if `coserve.yaml` or `rules.yaml` is there."""
    texts = {folder / "coserve.yaml": config_text(folder, answers), folder / "rules.yaml": rules_text(answers.boards)}
    if not (folder / CATALOG).exists():
        texts[folder / CATALOG] = CATALOG_TEXT
    if answers.dashboard == "network" and not (folder / TOKEN).exists():
        texts[folder / TOKEN] = secrets.token_hex(32) + "\n"
    for path, text in texts.items():
        make_folder(path.parent)
        path.touch(mode=_SECRET_MODE if path == folder / TOKEN else 0o666, exist_ok=False)
        path.write_text(text, encoding="utf-8")
    for name in ("journal", "images"):
        make_folder(folder / answers.data / name)
    return [*texts, folder / answers.data]


_SECURITY = f"""\
security:
  http_token: {TOKEN}      # to open the dashboard from another PC, type the content of this file
"""
CATALOG_TEXT = """\
# Which experts there are. `coserve train` and `coserve import` add each one with its file.
experts: {}
"""


def free_ports(folder: Path) -> list[int]:
    """Return ports that no program uses now, and no line whose folder lies beside `folder`, running or not."""
    beside = "".join(path.read_text("utf-8", "replace") for path in folder.resolve().parent.glob("*/coserve.yaml"))

    def is_free(port: int) -> bool:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            return False
        return f":{port}" not in beside

    choices = ([port + step for port in _PORTS] for step in range(0, 1000, 10))
    return next((ports for ports in choices if all(map(is_free, ports))), [*_PORTS])


def config_text(folder: Path, answers: Answers) -> str:
    data, is_off = answers.data, answers.dashboard == "no"
    intake, results, port = free_ports(folder)
    http = f"  {'# ' if is_off else ''}http: http://{_HTTP_HOSTS.get(answers.dashboard, '127.0.0.1')}:{port}"
    values = {
        "config": folder / "coserve.yaml",
        "intake": intake,
        "results": results,
        "http": f"{http:<63}# the dashboard, and /metrics for Prometheus",
        "database": _flow(f"sqlite:///{data / 'inspection.db'}"),
        "journal": _flow(str(data / "journal")),
        "images": _flow(str(data / "images")),
        "catalog": CATALOG,
        "devices": _device_lines(answers.memory),
        "keep": f", images_for: {answers.keep}" if answers.keep else "",
        "free": size(free_floor(folder / data)),
        "zone": zone_of_this_pc() or "UTC",
        "security": _SECURITY if answers.dashboard == "network" else "",
    }
    return Template(_template("line.yaml")).substitute(values).rstrip("\n") + "\n"


def _template(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _device_lines(memory: Mapping[str, int]) -> str:
    cores = psutil.cpu_count() or 1
    threads = max(1, (cores - 1) // 2)
    lines: list[str] = []
    for device, budget in memory.items():
        lines.append(f"  {device}:\n    expert_memory: {size(budget)}    # for experts; they are switched within it\n")
        if device == "cpu":
            lines.append(f"    executors: {min(cores, 2)}          # measured instead of guessed: coserve profile\n")
            lines.append(f"    threads: {threads}\n")
        else:
            cache = size(max(10**8, psutil.virtual_memory().total // 4 // len(memory) // 10**8 * 10**8))
            lines.append(f"    host_cache: {cache}       # experts that wait in RAM for this GPU\n")
    return "".join(lines).rstrip("\n")


def rules_text(boards: Mapping[str, Components]) -> str:
    lines = [
        "# Which expert looks at which component, and what passes: docs/rules.md",
        "# After a change:  coserve rules check rules.yaml  and  coserve reload",
        "boards:",
    ]
    for board, components in boards.items():
        lines += [f"  {_flow(board)}:", "    time_limit: 60s   # what is missing then is unknown"]
        lines.append("    components:")
        lines += [f"      {_flow(component)}: {_flow(amount)}" for component, amount in components.items()]
    return "\n".join(lines) + "\n\n" + _template("classifiers.yaml")


def _flow(value: Any) -> str:
    """Return a value on one line, quoted where rules need it: to YAML 1.2, `1e3` is a number."""
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6).removesuffix("...\n").strip()
    return text if read_yaml_text(text, "").data == value else json.dumps(value, ensure_ascii=False)
