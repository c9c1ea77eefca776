"""What a mixture-of-experts model is made of, read from its config.json. The one place that knows families by name.

No tensor is read here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey, ExpertWeights
from experts.moe.library import transformers

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How one kind of model names things. `{e}` stands for an expert's number; names follow a layer's block."""

    name: str
    experts_key: str
    intermediate_key: str
    #: The gate's module in a block.
    gate: str
    #: Tensors of one expert, in the order of a slot: the rows of gate_up first, then down.
    single: tuple[str, ...]
    #: The same, all experts of a layer in one tensor; empty where the family has no such layout.
    fused: tuple[str, ...]
    context_key: str | None = "max_position_embeddings"
    #: Older names of a block's tensors on disk, and what they are called now.
    renamed: Mapping[str, str] | None = None
    gated: bool = True


_GATED = ("experts.{e}.gate_proj.weight", "experts.{e}.up_proj.weight", "experts.{e}.down_proj.weight")
_FUSED = ("experts.gate_up_proj", "experts.down_proj")

FAMILIES: dict[str, ModelFamily] = {
    "mixtral": ModelFamily(
        "mixtral",
        "num_local_experts",
        "intermediate_size",
        "gate",
        ("experts.{e}.w1.weight", "experts.{e}.w3.weight", "experts.{e}.w2.weight"),
        _FUSED,
        renamed={".block_sparse_moe.": ".mlp."},
    ),
    "qwen2_moe": ModelFamily("qwen2_moe", "num_experts", "moe_intermediate_size", "gate", _GATED, _FUSED),
    "qwen3_moe": ModelFamily("qwen3_moe", "num_experts", "moe_intermediate_size", "gate", _GATED, _FUSED),
    "olmoe": ModelFamily("olmoe", "num_experts", "intermediate_size", "gate", _GATED, _FUSED),
    "switch_transformers": ModelFamily(
        "switch_transformers",
        "num_experts",
        "d_ff",
        "router",
        ("experts.expert_{e}.wi.weight", "experts.expert_{e}.wo.weight"),
        (),
        context_key=None,
        gated=False,
    ),
}


@dataclass(frozen=True, slots=True)
class MoeArch:
    """Shapes of a model: `layers` with `experts` each, of which a token takes `top_k`.

    `hidden` is H and `intermediate` I of one expert; `dtype` is what experts are computed in and what a slot holds.
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
    #: Positions the model can take, prompt and answer together; None where it has no limit of its own.
    context_tokens: int | None
    #: Of `layers`, those at the start that belong to an encoder.
    encoder_layers: int = 0
    #: Whether the gate divides a token's k weights by their sum.
    renormalise: bool = False

    @property
    def names(self) -> ModelFamily:
        """How this model's family names its tensors."""
        return FAMILIES[self.family]

    @property
    def gate_up_shape(self) -> tuple[int, int]:
        return ((2 if self.names.gated else 1) * self.intermediate, self.hidden)

    @property
    def down_shape(self) -> tuple[int, int]:
        return (self.hidden, self.intermediate)

    @property
    def gate_up_bytes(self) -> int:
        return self.gate_up_shape[0] * self.gate_up_shape[1] * self.dtype.itemsize

    @property
    def down_offset(self) -> int:
        """Bytes from a slot's start to the first of `down`."""
        return -(-self.gate_up_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in a slot."""
        size = self.down_offset + self.hidden * self.intermediate * self.dtype.itemsize
        return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def weights(self, buffer: torch.Tensor) -> ExpertWeights:
        """Views of a slot's buffer, (at least expert_bytes,) uint8 on any device."""
        gate_up = buffer[: self.gate_up_bytes].view(self.dtype).view(self.gate_up_shape)
        down_end = self.down_offset + self.hidden * self.intermediate * self.dtype.itemsize
        return ExpertWeights(gate_up, buffer[self.down_offset : down_end].view(self.dtype).view(self.down_shape))

    def keys(self) -> tuple[ExpertKey, ...]:
        """All experts, layer by layer."""
        return tuple(ExpertKey(layer, expert) for layer in range(self.layers) for expert in range(self.experts))


def load_config(folder: Path) -> Any:
    """The checkpoint's configuration as transformers understands it. Raises ModelError."""
    file = folder / "config.json"
    try:
        table = json.loads(file.read_bytes())
    except FileNotFoundError:
        what = "there is no config.json" if folder.is_dir() else "there is no such folder"
        raise ModelError(folder, f"{what}; give the folder of a checkpoint in Hugging Face format") from None
    except (OSError, ValueError) as error:
        raise ModelError(file, f"cannot be read as JSON ({error}); restore the file of the checkpoint") from error
    found = table.get("model_type") if isinstance(table, dict) else None
    if not isinstance(found, str) or found not in FAMILIES:
        known = ", ".join(FAMILIES)
        message = f"model_type is {found!r}; expected one of {known}: convert the checkpoint or choose another model"
        raise ModelError(file, message)
    try:
        return transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(file, f"is not a configuration of {found} ({reason}); restore the file") from error


def read_arch(folder: Path, config: Any, stored: torch.dtype) -> MoeArch:
    """What the runtime must know of a configuration, as `load_config` gave it; `stored` is the type of its weights.

    Raises ModelError.
    """
    family = FAMILIES[config.model_type]
    file = folder / "config.json"
    blocks, encoder_layers = _switch_blocks(config) if family.context_key is None else (_causal_blocks(config, file), 0)
    if not blocks:
        raise ModelError(file, "describes no mixture-of-experts layer; this runtime is for models that have some")
    experts = _number(config, family.experts_key, file)
    top_k = 1 if family.context_key is None else _number(config, "num_experts_per_tok", file)
    if top_k > experts:
        message = f"num_experts_per_tok is {top_k} and {family.experts_key} {experts}; a token takes {experts} at most"
        raise ModelError(file, message)
    return MoeArch(
        family=family.name,
        layers=len(blocks),
        experts=experts,
        top_k=top_k,
        hidden=_number(config, "hidden_size", file),
        intermediate=_number(config, family.intermediate_key, file),
        dtype=config.dtype or stored,
        blocks=blocks,
        context_tokens=getattr(config, family.context_key) if family.context_key else None,
        encoder_layers=encoder_layers,
        renormalise=bool(getattr(config, "norm_topk_prob", family.name == "mixtral")),
    )


def _number(config: Any, key: str, file: Path) -> int:
    value = getattr(config, key, None)
    if not isinstance(value, int) or value < 1:
        raise ModelError(file, f"{key} is {value!r}; expected a whole number above 0: restore the file")
    return value


def _causal_blocks(config: Any, file: Path) -> tuple[str, ...]:
    """Layers that have experts: Qwen's may leave some dense."""
    dense = getattr(config, "mlp_only_layers", None) or []
    if not isinstance(dense, list):
        raise ModelError(file, f"mlp_only_layers is {dense!r}; expected a list of layers: restore the file")
    step = _number(config, "decoder_sparse_step", file) if hasattr(config, "decoder_sparse_step") else 1
    layers = range(config.num_hidden_layers)
    return tuple(f"model.layers.{n}.mlp" for n in layers if n not in dense and (n + 1) % step == 0)


def _switch_blocks(config: Any) -> tuple[tuple[str, ...], int]:
    """The encoder's sparse layers, then the decoder's, and how many are the encoder's."""
    encoder = _switch_stack("encoder", config.num_layers, config.encoder_sparse_step, 1)
    decoder = _switch_stack("decoder", config.num_decoder_layers, config.decoder_sparse_step, 2)
    return encoder + decoder, len(encoder)


def _switch_stack(stack: str, layers: int, step: int, part: int) -> tuple[str, ...]:
    sparse = [n for n in range(layers) if step > 0 and (step == 1 or n % step == 1)]
    return tuple(f"{stack}.block.{n}.layer.{part}.mlp" for n in sparse)
