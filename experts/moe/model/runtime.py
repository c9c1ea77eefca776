"""A checkpoint in service: the model that transformers builds, without its experts' weights.

The model is built on `meta`, without memory; each layer's experts are replaced by a module without weights; all other
tensors are read from the files and assigned. Nothing is downloaded.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch

from experts.moe.arch import MoeArch, first_line, load_config, read_arch
from experts.moe.cache.slots import SlotCache
from experts.moe.cache.weight_transfer import weight_transfer_for
from experts.moe.errors import ModelError
from experts.moe.gating import ExpertIterator, ForwardStep, Routing, StepRow
from experts.moe.library import transformers
from experts.moe.model.dispatch import replace_experts
from experts.moe.model.mode import Mode
from experts.moe.weights.checkpoint import (
    Checkpoint,
    CheckpointStore,
    ExpertStore,
    check_tensors,
    expert_shapes,
    load_tensors,
    read_checkpoint,
)
from experts.moe.weights.slot_file import SlotFileStore, Source, slot_file

#: Called for each layer with the step, the gate's routing and the routing that is carried out.
Observer = Callable[[ForwardStep, Routing, Routing], None]


class MoeRuntime:
    """One model in service. Forwards run one at a time, in the thread that calls `model` or `model.generate`."""

    def __init__(self, model: Any, arch: MoeArch, store: ExpertStore, mode: Mode) -> None:
        self.model = model
        self.arch = arch
        self.store = store
        self.mode = mode
        self.observers: list[Observer] = []
        self._step: ForwardStep | None = None
        self._named_rows: tuple[StepRow, ...] | None = None
        self._lock = threading.RLock()
        self.cache: SlotCache

    @classmethod
    def open(
        cls, folder: Path, mode: Mode, budget_bytes: int, *, device: str = "cpu", storage: Source = "auto"
    ) -> "MoeRuntime":
        """Check a checkpoint and put it in service, its experts within `budget_bytes`. Raises ModelError."""
        model, arch, checkpoint = read_model(folder)
        mode.require_budget(budget_bytes, arch, folder)
        with ExitStack() as undo:
            store = open_store(arch, checkpoint, storage)
            undo.callback(store.close)
            runtime = cls(model, arch, store, mode)
            blocks = [model.get_submodule(name) for name in arch.blocks]
            for layer, block in enumerate(blocks):
                replace_experts(block, layer, arch, model.config, runtime)
            load_tensors(model, checkpoint, device)
            model.forward = wraps(model.forward)(partial(runtime._forward, model.forward))
            transfer = weight_transfer_for(store, device)
            runtime.cache = SlotCache(store, budget_bytes - mode.reserved_bytes, mode.eviction_policy(arch), transfer)
            undo.callback(runtime.cache.close)
            mode.gates = tuple(partial(torch.nn.functional.linear, weight=block.gate.weight) for block in blocks)
            mode.attach(runtime.cache, arch)
            undo.pop_all()
        return runtime

    @contextmanager
    def step(self, rows: Sequence[StepRow]) -> Iterator[None]:
        """Name the rows of the forward inside this context; forwards outside have anonymous rows."""
        self._named_rows = tuple(rows)
        try:
            yield
        finally:
            self._named_rows = None

    def check(self) -> None:
        """Raise if a failed step left state that later ones would meet: a wrong ledger, a lost device."""
        self.cache.check()
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def close(self) -> None:
        """Stop loading and give the memory of all slots back."""
        self.mode.close()
        self.cache.close()
        self.store.close()

    def route_layer(self, routing: Routing) -> tuple[Routing, ExpertIterator]:
        """Let the mode change a layer's routing; return it with its experts' weights."""
        carried_out = self.mode.route(routing)
        if self.observers:
            assert self._step is not None, "layers run within a forward of the model"
            for observer in self.observers:
                observer(self._step, routing, carried_out)
        return carried_out, self.mode.experts(carried_out)

    def _forward(self, inner: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
        with self._lock:
            self._step = self._next_step(args, arguments)
            try:
                self.cache.begin_step()
                self.mode.begin(self._step)
                return inner(*args, **arguments)
            finally:
                step, self._step = self._step, None
                try:
                    self.mode.end(step)
                finally:
                    self.cache.end_step(step)

    def _next_step(self, args: tuple[Any, ...], arguments: Mapping[str, Any]) -> ForwardStep:
        batch, tokens = (args[0] if args else arguments["input_ids"]).shape
        past = arguments.get("past_key_values")
        prefill, limit = past is None or past.get_seq_length() == 0, self.arch.context_tokens
        if prefill and limit is not None and tokens > limit:
            message = f"the prompt has {tokens} tokens, the model's context {limit}; shorten it"
            raise ModelError(self.store.folder, message)
        rows = self._named_rows or (StepRow("", None, tokens),) * batch
        return ForwardStep("prefill" if prefill else "decode", rows)


def read_model(folder: Path) -> tuple[Any, MoeArch, Checkpoint]:
    """Return the model on `meta` with its experts, its shapes, and the places of its tensors.

    Raises ModelError unless the checkpoint has exactly the tensors of the model, in the right shapes.
    """
    library = transformers()
    config = load_config(folder)
    checkpoint = read_checkpoint(folder, config.model_type)
    arch = read_arch(folder, config, checkpoint.dtype)
    try:
        with torch.device("meta"):
            # Of float32 first: for any other type the library changes torch's default in all threads, images' included.
            model = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
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
            message = f"cannot be read ({first_line(error)}); restore the file, or delete it"
            raise ModelError(file, message) from error
    return model, arch, checkpoint


def open_store(arch: MoeArch, checkpoint: Checkpoint, storage: Source) -> ExpertStore:
    """Open the experts of a checkpoint; `storage` as in `MoeRuntime.open`. Raises ModelError."""
    if storage == "checkpoint" or (storage == "auto" and not slot_file(checkpoint.folder, "exact").is_file()):
        return CheckpointStore(arch, checkpoint)
    return SlotFileStore(arch, checkpoint, "exact" if storage == "auto" else storage)
