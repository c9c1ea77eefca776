"""Check before the start that the language models of a configuration can be served, by their headers alone."""

from pathlib import Path

from daemon.config.settings import Config, Model, at_their_lines
from daemon.errors import MissingExtraError
from experts.moe.errors import ModelError
from routing_rules.load import KeyPath


def model_problems(path: Path, config: Config) -> list[str]:
    """Return the first mistake of each model, with the line that names its checkpoint."""
    problems: list[tuple[KeyPath, str]] = []
    for name, model in config.models.items():
        try:
            _require_servable(model)
        except ModuleNotFoundError as missing:
            problem = str(MissingExtraError(missing.name, "a language model", "moe"))
        except (ModelError, TypeError) as error:  # TypeError: an option that the mode does not have
            problem = str(error)
        else:
            continue
        problems.append((("models", name, "checkpoint"), problem))
    return at_their_lines(path, problems)


def _require_servable(model: Model) -> None:
    """Raise ModelError for the first mistake in configuration, headers, tokenizer, prepared files or memory.

    Weights are not read. Imports torch and transformers, which take seconds and are not needed without models.
    """
    from experts.moe.model.keys_values import TextMemory, bytes_per_token, require_text_memory  # noqa: PLC0415
    from experts.moe.model.mode import Mode  # noqa: PLC0415
    from experts.moe.model.runtime import open_store, read_model  # noqa: PLC0415
    from experts.moe.model.text import TextCodec  # noqa: PLC0415
    from experts.moe.modes import open_mode  # noqa: PLC0415

    folder = model.checkpoint
    network, arch, checkpoint = read_model(folder)
    mode = open_mode(model.mode, folder, model.mode_options)
    mode.require_budget(model.memory, arch, folder)
    try:
        # Only the general minimum: a mode that cannot shrink so far keeps its memory while serving.
        Mode.require_budget(mode, model.least_bytes, arch, folder)
    except ModelError as error:
        message = f"least_memory (a quarter of memory where it is not set): {error.message}"
        raise ModelError(folder, message) from error
    mode.close()
    open_store(arch, checkpoint, model.storage).close()
    TextCodec.open(folder)
    memory = TextMemory(bytes_per_token(network.config, arch.dtype), model.text_bytes)
    require_text_memory(folder, memory, arch.context_tokens, model.max_new_tokens)
