"""Whether the language models of a configuration could be served: their headers, tokenizers and prepared parts."""

from pathlib import Path

from daemon.config.settings import Config, Model, at_their_lines
from daemon.errors import MissingExtraError
from experts.moe.errors import ModelError
from routing_rules.load import KeyPath


def model_problems(path: Path, config: Config) -> list[str]:
    """The first mistake of each model, with the line that names its checkpoint."""
    found: list[tuple[KeyPath, str]] = []
    for name, model in config.models.items():
        problem = _problem(model)
        if problem is not None:
            found.append((("models", name, "checkpoint"), problem))
    return at_their_lines(path, found)


def _problem(model: Model) -> str | None:
    from experts.moe.served import require_servable  # noqa: PLC0415  brings torch, which a line without models is checked without

    try:
        require_servable(
            model.checkpoint,
            model.mode,
            model.mode_options,
            model.memory,
            model.least_bytes,
            model.storage,
            text_bytes=model.text_bytes,
            max_new_tokens=model.max_new_tokens,
        )
    except ModuleNotFoundError as missing:
        return str(MissingExtraError(missing.name, "a language model", "moe"))
    except (ModelError, TypeError) as error:  # TypeError: an option that the mode does not have
        return str(error)
    return None
