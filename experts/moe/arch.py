"""Shapes of a mixture-of-experts model, from its config.json: the only place that knows model families by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from experts.moe.errors import ModelError
from experts.moe.folder import read_json
from experts.moe.gating import ExpertKey, ExpertWeights
from experts.moe.library import transformers

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Names in one kind of model. `{e}` stands for an expert's number; tensor names follow their block's."""

    experts_key: str
    intermediate_key: str
    #: Tensors of one expert, in the order of a slot: the rows of gate_up first, then down.
    single: tuple[str, ...]
    #: Older names of a block's tensors on disk, and their names in the model.
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    #: True if the gate divides a token's k weights by their sum, unless `norm_topk_prob` says otherwise.
    renormalises: bool = False


#: Tensors of all experts of a layer together, where a checkpoint has such.
FUSED = ("experts.gate_up_proj", "experts.down_proj")
_GATED = ("experts.{e}.gate_proj.weight", "experts.{e}.up_proj.weight", "experts.{e}.down_proj.weight")

#: One entry for each family of decoders.
FAMILIES: dict[str, ModelFamily] = {
    "mixtral": ModelFamily(
        "num_local_experts",
        "intermediate_size",
        ("experts.{e}.w1.weight", "experts.{e}.w3.weight", "experts.{e}.w2.weight"),
        renamed={".block_sparse_moe.": ".mlp."},
        renormalises=True,
    ),
    "qwen2_moe": ModelFamily("num_experts", "moe_intermediate_size", _GATED),
    "qwen3_moe": ModelFamily("num_experts", "moe_intermediate_size", _GATED),
    "olmoe": ModelFamily("num_experts", "intermediate_size", _GATED),
}


@dataclass(frozen=True, slots=True)
class MoeArch:
    """Shapes of a model: `layers` with `experts` each, of which a token takes `top_k`.

    `hidden` is H and `intermediate` I of one expert; `dtype` is that of computation and of slots.
    """

    family: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    #: Module path of each layer's block in the model, `model.layers.3.mlp`, in the order in which layers run.
    blocks: tuple[str, ...]
    #: Positions the model can take, prompt and answer together; None if it has no limit of its own.
    context_tokens: int | None
    #: True if the gate divides a token's k weights by their sum.
    renormalise: bool = False

    @property
    def gate_up_shape(self) -> tuple[int, int]:
        return (2 * self.intermediate, self.hidden)

    @property
    def down_shape(self) -> tuple[int, int]:
        return (self.hidden, self.intermediate)

    @property
    def gate_up_bytes(self) -> int:
        return self.gate_up_shape[0] * self.gate_up_shape[1] * self.dtype.itemsize

    @property
    def down_offset(self) -> int:
        return -(-self.gate_up_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    @property
    def expert_bytes(self) -> int:
        size = self.down_offset + self.hidden * self.intermediate * self.dtype.itemsize
        return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    @property
    def expert_keys(self) -> tuple[ExpertKey, ...]:
        return tuple(ExpertKey(layer, expert) for layer in range(self.layers) for expert in range(self.experts))

    def weights(self, buffer: torch.Tensor) -> ExpertWeights:
        """Return views of a slot's buffer, (at least expert_bytes,) uint8 on any device."""
        gate_up = buffer[: self.gate_up_bytes].view(self.dtype).view(self.gate_up_shape)
        down_end = self.down_offset + self.hidden * self.intermediate * self.dtype.itemsize
        return ExpertWeights(gate_up, buffer[self.down_offset : down_end].view(self.dtype).view(self.down_shape))


def load_config(folder: Path) -> Any:
    """Return the checkpoint's configuration as transformers reads it. Raises ModelError."""
    file = folder / "config.json"
    family = read_json(file).get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(FAMILIES)
        message = f"model_type is {family!r}; expected one of {known}: convert the checkpoint or choose another model"
        raise ModelError(file, message)
    try:
        return transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ModelError(file, f"is not a configuration of {family} ({first_line(error)}); restore the file") from error


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def read_arch(folder: Path, config: Any, stored: torch.dtype) -> MoeArch:
    """Return the shapes in a configuration of `load_config`; `stored` is its weights' type. Raises ModelError."""
    family = FAMILIES[config.model_type]
    file = folder / "config.json"
    blocks = _causal_blocks(config, file)
    if not blocks:
        raise ModelError(file, "describes no mixture-of-experts layer; this runtime is for models that have some")
    experts = _number(config, family.experts_key, file)
    top_k = _number(config, "num_experts_per_tok", file)
    if top_k > experts:
        message = f"num_experts_per_tok is {top_k} and {family.experts_key} {experts}; a token takes {experts} at most"
        raise ModelError(file, message)
    return MoeArch(
        family=config.model_type,
        layers=len(blocks),
        experts=experts,
        top_k=top_k,
        hidden=_number(config, "hidden_size", file),
        intermediate=_number(config, family.intermediate_key, file),
        dtype=config.dtype or stored,
        blocks=blocks,
        context_tokens=config.max_position_embeddings,
        renormalise=bool(getattr(config, "norm_topk_prob", family.renormalises)),
    )


def _number(config: Any, key: str, file: Path) -> int:
    value = getattr(config, key, None)
    if not isinstance(value, int) or value < 1:
        raise ModelError(file, f"{key} is {value!r}; expected a whole number above 0: restore the file")
    return value


def _causal_blocks(config: Any, file: Path) -> tuple[str, ...]:
    dense = getattr(config, "mlp_only_layers", None) or []
    if not isinstance(dense, list):
        raise ModelError(file, f"mlp_only_layers is {dense!r}; expected a list of layers: restore the file")
    step = _number(config, "decoder_sparse_step", file) if hasattr(config, "decoder_sparse_step") else 1
    layers = range(config.num_hidden_layers)
    return tuple(f"model.layers.{n}.mlp" for n in layers if n not in dense and (n + 1) % step == 0)
