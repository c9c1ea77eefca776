"""Devices that language models share with images: the division at the start, and its problems."""

from dataclasses import dataclass

from daemon.config.settings import Config, Model
from daemon.line.lease import Lease, ModelShare
from daemon.units import size_text
from experts.moe.errors import ModelError
from experts.moe.folder import dense_bytes


@dataclass(slots=True)
class SharedDevice:
    """A device with models on it. `reserved_bytes` stay reserved: weights outside of experts, memory of texts.

    `ordered_bytes` is what the images' pools were last told to have, `refused_bytes` what they did not take, and are
    not asked to again before `refused_until_s`. `switches` are those of all devices when this one was last looked at.
    """

    name: str
    lease: Lease
    models: tuple[str, ...]
    reserved_bytes: int
    ordered_bytes: int
    refused_bytes: int | None = None
    refused_until_s: float = 0.0
    switches: int = 0


def shared_devices(config: Config) -> list[SharedDevice]:
    return [_shared(config, name) for name in config.devices if any(m.device == name for m in config.models.values())]


def images_config(config: Config) -> Config:
    devices = dict(config.devices)
    for shared in shared_devices(config):
        update = {"expert_memory": max(0, shared.ordered_bytes)}
        devices[shared.name] = devices[shared.name].model_copy(update=update)
    return config.model_copy(update={"devices": devices})


def sharing_problems(config: Config) -> list[str]:
    problems: list[str] = []
    for shared in shared_devices(config):
        total_bytes = config.devices[shared.name].expert_memory
        if shared.ordered_bytes <= 0:
            taken_bytes = total_bytes - shared.ordered_bytes
            problems.append(
                f"devices.{shared.name}.expert_memory: {size_text(total_bytes)} leave nothing for images: models"
                f" {', '.join(shared.models)} take {size_text(taken_bytes)}, {size_text(shared.reserved_bytes)} of them"
                " for texts and for weights that are not experts'; raise it, or lower memory or text_memory of"
                f" models.{shared.models[0]}"
            )
    return problems


def _shared(config: Config, name: str) -> SharedDevice:
    models = {model: settings for model, settings in config.models.items() if settings.device == name}
    reserved_bytes = sum(_dense_bytes(settings) + settings.text_bytes for settings in models.values())
    shares = [ModelShare(name, model.memory, model.least_bytes) for name, model in models.items()]
    lease = Lease(config.devices[name].expert_memory - reserved_bytes, shares)
    return SharedDevice(name, lease, tuple(models), reserved_bytes, lease.first_grant().images_bytes)


def _dense_bytes(model: Model) -> int:
    """Return the model's bytes outside of experts; 0 if its files are unreadable: then it is not opened."""
    try:
        return dense_bytes(model.checkpoint)
    except ModelError:
        return 0
