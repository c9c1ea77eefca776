"""`coserve plant …`: the hub of many lines."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from daemon.errors import ConfigError, MissingExtraError, ReleaseError
from daemon.units import count_text
from tools.cli import plant_versions
from tools.terminal.console import AsJson, CommandError, console, exit_on, fail, print_json
from tools.terminal.option_values import Commands

_EXTRA = {"boto3", "cryptography", "fastapi", "jinja2", "psycopg", "starlette", "uvicorn"}


class _Group(Commands):
    """A mistake in plant.yaml, a refusal or a missing package ends a command with one sentence."""

    def invoke(self, ctx: typer.Context) -> object:
        from daemon.wire.keys import KeyFileError
        from experts.versions import VersionsError

        try:
            return super().invoke(ctx)
        except (ConfigError, KeyFileError, ReleaseError, VersionsError) as error:
            fail(str(error), status=2 if ctx.invoked_subcommand == "run" else 1)
        except BrokenPipeError:
            raise  # the reader of the output has ended
        except OSError as error:  # a stick that is pulled out, a full disk
            fail(": ".join(str(part) for part in (error.filename, error.strerror or error) if part), status=1)
        except ModuleNotFoundError as missing:
            package = (missing.name or "").partition(".")[0]
            if package not in _EXTRA:
                raise
            fail(str(MissingExtraError(package, f"coserve plant {ctx.invoked_subcommand}", "plant")), status=2)


plant_app = typer.Typer(cls=_Group, no_args_is_help=True, help="One place for the results of many lines.")

plant_versions.add_to(plant_app)

PlantPath = Annotated[Path, typer.Argument(metavar="PLANT", help="The hub's plant.yaml.", show_default=False)]


@plant_app.command()
def run(plant: PlantPath) -> None:
    """Run the hub in the foreground: its database's schema and upkeep, pictures and pages; stops on SIGTERM or Ctrl-C.

    Example: coserve plant run /etc/coserve/plant.yaml
    """
    _must_exist(plant)
    from daemon.plant.hub import run_hub
    from daemon.plant.page.app import plant_pages
    from daemon.plant.releases import release_router
    from daemon.plant.rollouts import rollout_router

    run_hub(plant, plant_pages, release_router, rollout_router)


@plant_app.command()
def check(plant: PlantPath, as_json: AsJson = False) -> None:
    """Check plant.yaml, naming each mistake with its line, and its database. Status 1 if anything is wrong.

    Example: coserve plant check /etc/coserve/plant.yaml
    """
    _must_exist(plant)
    from daemon.plant.hub import check_hub

    facts = check_hub(plant)
    if as_json:
        print_json({"ok": True, **facts})
        return
    schema = count_text(facts["lines"], "line") if facts["schema"] else "no schema yet: coserve plant run makes it"
    console.print(f"{plant}: No mistakes found: PostgreSQL {facts['postgresql']}, {schema}", markup=False)


@plant_app.command()
def accept(
    plant: PlantPath, line: Annotated[str, typer.Argument(metavar="LINE", help="The line's name.", show_default=False)]
) -> None:
    """Let another PC take over a line's name once, after its old PC was replaced. The hub keeps the line's results.

    Example: coserve plant accept /etc/coserve/plant.yaml line-3
    """
    _must_exist(plant)
    from daemon.plant.hub import accept_line

    accept_line(plant, line)
    console.print(f"{line}: the next PC that connects under this name is accepted", markup=False)


@plant_app.command()
def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Where the plant is made.")] = Path("demo-plant"),
    port: Annotated[int, typer.Option(help="The hub's port; the lines have the next three.")] = 9480,
) -> None:
    """Show a plant on this PC: three lines of rendered boards, their hub with PostgreSQL and pages, until Ctrl-C.

    Example: coserve plant demo --dir demo-plant
    """
    from tools.demo.plant import run_plant_demo

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with exit_on(CommandError):
        run_plant_demo(folder, port)


def _must_exist(plant: Path) -> None:
    if not plant.is_file():
        fail(f"{plant} does not exist: docs/plant-hub.md has an example to begin with", status=2)
