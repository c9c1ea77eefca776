"""`coserve moe …`: prepare, check and measure language models whose experts stay on disk."""

from typing import Any

import typer

from daemon.errors import MissingExtraError
from experts.moe.errors import ModelError
from tools.moe import fit, importing, plan, trace, unite
from tools.terminal.console import fail
from tools.terminal.option_values import Commands

_EXTRA = {"tokenizers", "transformers"}


class _Group(Commands):
    """End with one sentence if a checkpoint is wrong or the extra `moe` is not installed."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModelError as error:
            fail(str(error), status=1)
        except ModuleNotFoundError as missing:
            package = (missing.name or "").partition(".")[0]
            if package not in _EXTRA:
                raise
            fail(str(MissingExtraError(package, "a language model", "moe")), status=2)


moe_app = typer.Typer(cls=_Group, no_args_is_help=True, help="Language models whose experts stay on disk.")
moe_app.command("import")(importing.import_model)
for command in (trace.trace, fit.fit, unite.unite, plan.plan):
    moe_app.command()(command)
