"""`coserve init`: asks five questions and writes a line; each question has an option, and a proposal."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from daemon.units import printable
from tools.terminal.console import AsJson, as_typed, console, fail, print_json

if TYPE_CHECKING:
    from tools.setup.answers import Answers, Dashboard
    from tools.setup.gpu import Gpu

Answer = TypeVar("Answer")


def init(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where the line is made.")] = Path("line"),
    board: Annotated[
        list[str] | None,
        typer.Option(help="A board type and its components, e.g. 'mainboard-a R0402=180 U=U1,U2'; repeats."),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="Read them from sample images, FOLDER/BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Where journal, database and images lie.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for experts: 2GB, or 'cuda:0=6GB cpu=2GB'.")
    ] = None,
    dashboard: Annotated[
        str | None, typer.Option(help="no, here (this PC alone), or network (any PC, with a token).")
    ] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long images of failures stay: 90d, 1y, ever.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take the proposals.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a line of your own: coserve.yaml, rules.yaml, a catalog, folders. Nothing that is there is overwritten.

    Example: coserve init line --board "mainboard-a R0402=180 QFP64=U1,U2" --memory 2GB --dashboard here --yes
    """
    for name in ("coserve.yaml", "rules.yaml"):
        if (folder / name).exists():
            fail(f"{folder / name} is there already, and is never overwritten: name another folder", status=2)
    if board and images:
        fail("name the boards with --board or their --images, not both", status=2)
    from routing_rules.compile import RulesError, compile_rules
    from routing_rules.load import read_yaml_text
    from tools.setup import answers as parsing
    from tools.setup.line_files import rules_text, write_line

    asking = _Asking(is_silent=yes or as_json)
    try:
        answers = parsing.Answers(
            _boards(asking, board, images),
            asking.ask(
                "2/5 Where images and results lie", "data", parsing.parse_folder, None if data is None else str(data)
            ),
            _memory(asking, memory),
            asking.ask(
                "4/5 Dashboard: no, here (this PC), network (with a token)", "here", parsing.parse_dashboard, dashboard
            ),
            asking.ask("5/5 How long images of failed boards stay: 90d, 1y, ever", "90d", parsing.parse_keep, keep),
        )
        routes = compile_rules(read_yaml_text(rules_text(answers.boards), "rules.yaml", refuse_hidden=True))
        written_files = write_line(folder, answers)
    except parsing.AnswerError as error:
        fail(str(error), status=2)
    except RulesError as error:
        fail(f"that makes no rules: {error.problems[0].message}", status=2)
    except OSError as error:
        fail(f"{error.filename or folder}: {error.strerror or error}", status=2)
    _report(folder, written_files, sorted(routes.experts), answers, as_json)


class _Asking:
    """Asks at the terminal what no option has answered."""

    def __init__(self, *, is_silent: bool) -> None:
        self._is_silent = is_silent

    def ask(self, text: str, proposal: str, parse: Callable[[str], Answer], option: str | None) -> Answer:
        """Return the option; else the proposal off a terminal; else ask until the answer can be used."""
        if option is not None or self._is_silent:
            return parse(proposal if option is None else option)

        def checked(typed: str) -> Answer:
            from tools.setup.answers import AnswerError

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


def _boards(asking: _Asking, board: Sequence[str] | None, images: Path | None) -> dict[str, Any]:
    from tools.setup.answers import EXAMPLE_BOARD, boards_in, parse_board, parse_boards

    if images is not None:
        return boards_in(images)
    if board:
        return dict(parse_board(text) for text in board)
    question = "1/5 A board type and its components (more: in rules.yaml, or --board), or a folder of sample images"
    return asking.ask(question, EXAMPLE_BOARD, parse_boards, None)


def _memory(asking: _Asking, memory: str | None) -> dict[str, int]:
    from tools.setup.answers import parse_memory, proposed_memory, ram, size

    gpus = _gpus()
    proposed = proposed_memory(gpus)
    sizes = [f"{gpu.name} with {size(gpu.total_bytes)}" for gpu in gpus]
    text = f"3/5 Memory for experts (this PC has {', '.join([*sizes, ram()])})"
    proposal = " ".join(f"{device}={size(budget)}" for device, budget in proposed.items())
    return asking.ask(text, proposal, lambda typed: parse_memory(typed, list(proposed)), memory)


def _gpus() -> "Sequence[Gpu]":
    from tools.setup.gpu import find_driver

    driver = find_driver()
    return driver.gpus if driver else ()


def _report(folder: Path, written_files: list[Path], experts: list[str], answers: "Answers", as_json: bool) -> None:
    """Print the files that were made, the result of `coserve check`, and the next commands."""
    from daemon.check import check_line
    from daemon.line.line import load_catalog
    from tools.setup.answers import too_much_memory
    from tools.setup.line_files import CATALOG

    config = folder / "coserve.yaml"
    catalog, _, _ = load_catalog(folder / CATALOG)
    missing = [expert for expert in experts if expert not in (catalog or {})]
    problems, _ = check_line(config)
    others = [problem for problem in problems if not any(f"no expert `{expert}`" in problem for expert in missing)]
    others += [f"{config}: {problem}" for problem in too_much_memory(answers.memory, _gpus())]
    words = [f"train all training --out {folder / 'experts'}"] if missing else []
    commands = [as_typed(line) for line in (*words, *(f"{word} {config}" for word in ("check", "doctor", "run")))]
    if as_json:
        report = {"config": str(config), "made": list(map(str, written_files)), "missing_experts": missing}
        print_json(report | {"problems": others, "next": commands})
        return
    for path in written_files:
        console.print(f"made  {path}", markup=False)
    for problem in others:
        console.print(problem, markup=False, style="yellow")
    if missing:
        console.print(
            f"\nExperts still to be trained, or imported: {', '.join(missing)}.\nSort pictures of each component type"
            f" into a folder for each label\n(training/{missing[0]}/ok, training/{missing[0]}/missing, …), then:",
            markup=False,
        )
    else:
        console.print("\nNext:")
    for command in commands:
        console.print(f"  {command}", markup=False)
    _show_dashboard(folder, answers.dashboard)


def _show_dashboard(folder: Path, dashboard: "Dashboard") -> None:
    from daemon.host.machine import own_address
    from tools.setup.line_files import PORT, TOKEN

    if dashboard != "no":
        host = own_address() if dashboard == "network" else "127.0.0.1"
        console.print(f"\nWhile it runs, the dashboard is at http://{host}:{PORT}/", markup=False)
    if dashboard == "network":
        console.print(f"The token is in {folder / TOKEN}", markup=False)
