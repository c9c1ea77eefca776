"""A checkpoint in service: the model as transformers builds it, without its experts' weights.

The model is built on the `meta` device, which costs no memory; each layer's experts are replaced by a module that has
none; all other tensors are read from the files and assigned. Nothing downloads anything.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from experts.moe.arch import MoeArch, load_config, read_arch
from experts.moe.cache.link import SlowLink
from experts.moe.cache.slots import SlotCache
from experts.moe.cache.weight_transfer import weight_transfer_for
from experts.moe.errors import ModelError
from experts.moe.gating import ExpertIterator, ForwardStep, Routing, StepRow
from experts.moe.library import transformers
from experts.moe.model import switch
from experts.moe.model.dispatch import OffloadedExperts
from experts.moe.weights.checkpoint import Checkpoint, check_tensors, expert_shapes, read_checkpoint
from experts.moe.weights.expert_store import CheckpointStore, ExpertStore
from experts.moe.weights.slot_file import STORAGES, SlotFileStore, slot_file
from experts.moe.weights.tensors import load_tensors

if TYPE_CHECKING:  # modes import this module
    from experts.moe.model.mode import Gate, Mode

Observer = Callable[[ForwardStep, Routing, Routing], None]

#: Whose shape says how many rows and tokens a forward has, the first that is there.
_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")


class MoeRuntime:
    """One model in service. Forwards run one at a time, in the thread that calls `model` or `model.generate`.

    `observers` are told, layer by layer, the routing as the gate gave it and as it was carried out.
    """

    def __init__(self, model: Any, tokenizer: Any, arch: MoeArch, store: ExpertStore, mode: "Mode") -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.arch = arch
        self.store = store
        self.mode = mode
        self.observers: list[Observer] = []
        self._number = 0
        self._step: ForwardStep | None = None
        self._named: tuple[StepRow, ...] | None = None
        self._lock = threading.RLock()
        self.cache: SlotCache

    @classmethod
    def open(
        cls,
        folder: Path,
        mode: "Mode",
        budget_bytes: int,
        *,
        device: str = "cpu",
        link: SlowLink | None = None,
        storage: str = "auto",
    ) -> "MoeRuntime":
        """Check a checkpoint and put it in service, its experts within `budget_bytes`. Raises ModelError.

        `device`: "cpu" or "cuda:N". `storage`: where experts are read from, "checkpoint" for its own files, "exact",
        "int8" or "int4" for what `coserve moe import` wrote; "auto" is "exact" where that is there, else "checkpoint".
        """
        folder = Path(folder)
        model, arch, checkpoint = read_model(folder)
        require_budget(folder, arch, budget_bytes, lossless=mode.lossless)
        mode.require(budget_bytes, arch, folder)
        with ExitStack() as undo:
            store = open_store(arch, checkpoint, storage)
            undo.callback(store.close)
            runtime = cls(model, read_tokenizer(folder), arch, store, mode)
            runtime._replace_experts()
            load_tensors(model, checkpoint, device)
            runtime._watch()
            carrier = weight_transfer_for(store, device)
            slots_bytes = budget_bytes - mode.reserved_bytes
            runtime.cache = SlotCache(store, slots_bytes, mode.residency(arch), carrier, link=link)
            undo.callback(runtime.cache.close)
            mode.gates = runtime._gates()
            mode.attach(runtime.cache, arch)
            undo.pop_all()
        return runtime

    @contextmanager
    def step(self, rows: Sequence[StepRow]) -> Iterator[None]:
        """Name the rows of the forward that follows; forwards outside have anonymous rows."""
        self._named = tuple(rows)
        try:
            yield
        finally:
            self._named = None

    def check_prompt(self, tokens: int, new_tokens: int = 0) -> None:
        """Raise ModelError for a prompt that is empty, or that does not fit into the context with its answer."""
        file = self.store.folder
        if tokens < 1:
            raise ModelError(file, "the prompt is empty; give at least one token")
        limit = self.arch.context_tokens
        if limit is not None and tokens + new_tokens > limit:
            answer = f" and {new_tokens} new ones" if new_tokens else ""
            message = f"the prompt has {tokens} tokens{answer}, the model's context {limit}; shorten it"
            raise ModelError(file, f"{message} to {max(limit - new_tokens, 0)}" if new_tokens else message)

    def check(self) -> None:
        """Raise what a failed step has left that later ones would stumble over: books that are wrong, a lost device."""
        self.cache.check()
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def close(self) -> None:
        """End loading and give the memory of all slots back."""
        self.mode.close()
        self.cache.close()
        self.store.close()

    def carry_out(self, routing: Routing) -> tuple[Routing, ExpertIterator]:
        """For a layer: what the mode makes of its routing, and the weights for that."""
        done = self.mode.route(routing)
        if self.observers:
            step = self._step
            assert step is not None, "layers run within a forward of the model"
            for observer in self.observers:
                observer(step, routing, done)
        return done, self.mode.experts(done)

    def _replace_experts(self) -> None:
        """Each layer's experts give way to a module without weights, which a hook tells what the gate said."""
        for layer, name in enumerate(self.arch.blocks):
            block = self.model.get_submodule(name)
            if self.arch.family == switch.FAMILY:
                switch.replace_experts(block, layer, self.arch, self)
                continue
            block.experts = OffloadedExperts(layer, self.arch, self.model.config, block.experts.act_fn, self)
            block.gate.register_forward_hook(partial(_leave_logits, block.experts))

    def _gates(self) -> "tuple[Gate, ...]":
        """Each layer's gate without its choice: (T, H) to logits (T, E)."""
        blocks = [self.model.get_submodule(name) for name in self.arch.blocks]
        if self.arch.family == switch.FAMILY:
            return tuple(switch.gate(block) for block in blocks)
        return tuple(partial(_gate_logits, block.gate) for block in blocks)

    def _watch(self) -> None:
        """A step is one forward of the model, or of the encoder where `generate` calls that by itself."""
        modules = [self.model]
        if self.arch.family == switch.FAMILY:
            modules.append(self.model.get_submodule("encoder"))
        for module in modules:
            module.forward = wraps(module.forward)(partial(self._forward, module.forward))
        self.model.generate = wraps(self.model.generate)(partial(self._generate, self.model.generate))

    def _generate(self, inner: Callable[..., Any], inputs: torch.Tensor | None = None, **given: Any) -> Any:
        prompt = inputs if inputs is not None else given.get("input_ids")
        if prompt is not None:
            self.check_prompt(prompt.shape[-1])
        return inner(inputs, **given)

    def _forward(self, inner: Callable[..., Any], *args: Any, **given: Any) -> Any:
        """One step, the first to come; a forward within it (an encoder's) belongs to it."""
        with self._lock:
            if self._step is not None:
                return inner(*args, **given)
            self._step = self._next_step(args, given)
            try:
                self.cache.begin(self._step)
                self.mode.begin(self._step)
                return inner(*args, **given)
            finally:
                step, self._step = self._step, None
                try:
                    self.mode.end(step)
                finally:
                    self.cache.end(step)

    def _next_step(self, args: tuple[Any, ...], given: Mapping[str, Any]) -> ForwardStep:
        named = [given[name] for name in _INPUTS if given.get(name) is not None]
        batch, tokens = (named or list(args))[0].shape[:2]
        past = given.get("past_key_values")
        prefill = past is None or past.get_seq_length() == 0
        if prefill:
            self.check_prompt(tokens)
        self._number += 1
        rows = self._named or (StepRow("", None, tokens),) * batch
        return ForwardStep(self._number, "prefill" if prefill else "decode", rows)


def read_model(folder: Path) -> tuple[Any, MoeArch, Checkpoint]:
    """The model on `meta`, experts and all, its shapes, and where its tensors lie. Raises ModelError.

    The checkpoint fits: no tensor is missing, none left over, all are of the right shape.
    """
    library = transformers()
    config = load_config(folder)
    checkpoint = read_checkpoint(folder, config.model_type)
    arch = read_arch(folder, config, checkpoint.dtype)
    kind = library.AutoModelForSeq2SeqLM if config.is_encoder_decoder else library.AutoModelForCausalLM
    try:
        with torch.device("meta"):
            # Of float32 first: for any other type the library changes torch's default in all threads, images' included.
            model = kind.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(arch.dtype)
        config.dtype = arch.dtype
    except Exception as error:
        message = f"transformers cannot build this model ({error}); correct the configuration"
        raise ModelError(folder / "config.json", message) from error
    inside = tuple(f"{block}.experts." for block in arch.blocks)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if not name.startswith(inside)}
    check_tensors(checkpoint, shapes | expert_shapes(arch, checkpoint), tied=model.all_tied_weights_keys)
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            model.generation_config = library.GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(file, f"cannot be read ({reason}); restore the file, or delete it") from error
    return model, arch, checkpoint


def require_budget(folder: Path, arch: MoeArch, budget_bytes: int, *, lossless: bool) -> None:
    """Raise ModelError for a budget that a mode cannot work with.

    A mode that changes no answer may serve a layer in waves: one slot for each layer, or one token's experts. One that
    chooses among the experts it has needs a token's experts in each layer.
    """
    experts = min(arch.top_k, arch.layers) if lossless else arch.top_k * arch.layers
    least = experts * arch.expert_bytes
    if budget_bytes < least:
        message = f"a budget of {budget_bytes} bytes is too small: a token takes {arch.top_k} experts of "
        message += f"{arch.expert_bytes} bytes in each of {arch.layers} layers"
        raise ModelError(folder, f"{message}; give at least {least} bytes")


def open_store(arch: MoeArch, checkpoint: Checkpoint, storage: str) -> ExpertStore:
    """Experts of a checkpoint; `storage` as in `MoeRuntime.open`. Raises ModelError."""
    if storage == "checkpoint" or (storage == "auto" and not slot_file(checkpoint.folder, "exact").is_file()):
        return CheckpointStore(arch, checkpoint)
    wanted = "exact" if storage == "auto" else storage
    if wanted not in STORAGES:
        names = ", ".join(("auto", "checkpoint", *STORAGES))
        raise ModelError(checkpoint.folder, f"there is no storage {storage!r}; choose one of {names}")
    return SlotFileStore(arch, checkpoint, wanted)


def read_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, None where there is none. Raises ModelError for one that cannot be read."""
    names = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
    if not any((folder / name).is_file() for name in names):
        return None
    try:
        return transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(folder, f"its tokenizer cannot be read ({reason}); restore tokenizer.json") from error


def _leave_logits(experts: OffloadedExperts, _gate: nn.Module, _args: Any, said: tuple[torch.Tensor, ...]) -> None:
    experts.logits = said[0]


def _gate_logits(gate: Any, states: torch.Tensor) -> torch.Tensor:
    return functional.linear(states, gate.weight)
