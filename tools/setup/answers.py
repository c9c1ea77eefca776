"""The five answers that `coserve init` needs: question, proposal and value of each."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import psutil
import typer

from daemon.units import parse_bytes, parse_seconds, printable
from routing_rules.schema import MAX_NAME, is_name
from tools.setup.gpu import Gpu, find_driver
from tools.terminal.console import as_typed, fail

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


class AnswerError(ValueError):
    """An unusable answer; the text says what is expected."""


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
    """Return a typed folder; refuse what is plainly the answer to the question about boards."""
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
    from tools.camera.layout import SUFFIXES  # OpenCV comes with it

    if not folder.is_dir():
        raise AnswerError(f"no folder {folder}")
    boards: dict[str, dict[str, set[str]]] = {}
    for path in folder.glob("*/*/*.*"):
        designator, dot, component = path.stem.partition(".")
        if dot and path.suffix.lower() in SUFFIXES:
            boards.setdefault(path.parent.parent.name, {}).setdefault(component, set()).add(designator)
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


def ram() -> str:
    """Return this PC's memory, and how much is free."""
    memory = psutil.virtual_memory()
    return f"{size(_rounded(memory.total))} of RAM, {size(_rounded(memory.available))} free"


def _rounded(size: float) -> int:
    return max(_ROUND_BYTES, int(size) // _ROUND_BYTES * _ROUND_BYTES)


def free_floor(folder: Path) -> int:
    """Return the value for `retention.free`: 10 GB, or a tenth of a smaller disk."""
    present = next(path for path in (folder, *folder.parents) if path.is_dir())
    return min(_FREE_BYTES, _rounded(psutil.disk_usage(str(present)).total / _FREE_SHARE))


def size(count: int) -> str:
    """Return bytes as the configuration writes them: 2.5GB, 300MB."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6)):
        if count >= scale:
            return f"{count / scale:.1f}".removesuffix(".0") + unit
    return str(count)


class Asking:
    def __init__(self, *, is_silent: bool) -> None:
        self._is_silent = is_silent

    def ask(self, text: str, proposal: str, parse: Callable[[str], Answer], option: str | None) -> Answer:
        """Return the option; else the proposal off a terminal; else ask until the answer can be used."""
        if option is not None or self._is_silent:
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


def ask_for_boards(asking: Asking, board: Sequence[str] | None, images: Path | None) -> dict[str, Components]:
    if images is not None:
        return boards_in(images)
    if board:
        return dict(parse_board(text) for text in board)
    question = "1/5 A board type and its components (more: in rules.yaml, or --board), or a folder of sample images"
    return asking.ask(question, EXAMPLE_BOARD, parse_boards, None)


def ask_for_memory(asking: Asking, memory: str | None) -> dict[str, int]:
    gpus = gpus_here()
    proposed = proposed_memory(gpus)
    sizes = [f"{gpu.name} with {size(gpu.total_bytes)}" for gpu in gpus]
    text = f"3/5 Memory for experts (this PC has {', '.join([*sizes, ram()])})"
    proposal = " ".join(f"{device}={size(budget)}" for device, budget in proposed.items())
    return asking.ask(text, proposal, lambda typed: parse_memory(typed, list(proposed)), memory)


def gpus_here() -> Sequence[Gpu]:
    driver = find_driver()
    return driver.gpus if driver else ()
