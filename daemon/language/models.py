"""Language models in service: hands requests to their threads, watches for hangs, and shares memory with images."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from daemon.config.settings import Config, Model
from daemon.dispatch.drive import Drive
from daemon.dispatch.pool import Pool
from daemon.language.model_thread import ModelThread
from daemon.line.lease import Grant, Held
from daemon.line.shared_devices import SharedDevice, shared_devices
from daemon.records import Generation
from daemon.wire.control import ControlError
from experts.moe.errors import ModelError
from experts.moe.model.text import PromptError, TextCodec

if TYPE_CHECKING:
    from daemon.language.served_model import ServedModel

_LOOK_S = 0.2
#: The longest time between two looks that counts as time in which this process ran: it may have been suspended.
_MAX_BETWEEN_LOOKS_S = 5.0
_ANSWER_S = 2.0
#: The pools may accept later what they refused: pins go, a device comes back.
_REFUSED_FOR_S = 30.0


class Prompts:
    """A model as intake sees it: its tokenizer and settings, without its weights."""

    def __init__(self, name: str, model: Model, thread: ModelThread) -> None:
        self._name = name
        self._model = model
        self._thread = thread
        self._codec: TextCodec | None = None
        try:
            self._codec = TextCodec.open(model.checkpoint)
        except (ModelError, ModuleNotFoundError) as error:  # the model's thread says so in the status
            structlog.get_logger("model").warning("prompts_unchecked", model=name, error=str(error))

    def problem(self, request: Generation) -> str | None:
        """Return why the model will never continue this prompt; None also while that is not known."""
        tasks, max_tokens = self._model.tasks, self._model.max_new_tokens
        if tasks and request.task is not None and request.task not in tasks:
            return f"task: model {self._name} knows {', '.join(tasks)}, not {request.task!a}"
        if request.max_new_tokens is not None and request.max_new_tokens > max_tokens:
            return f"max_new_tokens: model {self._name} gives at most {max_tokens}, got {request.max_new_tokens}"
        if not request.prompt.strip():
            return "prompt: the prompt is empty"
        return self._too_long(request.prompt, max_tokens if request.max_new_tokens is None else request.max_new_tokens)

    def _too_long(self, prompt: str, new_tokens: int) -> str | None:
        codec, room = self._codec, self._thread.text_tokens
        # A token has a byte at least, so that short prompts need no counting.
        max_tokens = 2 * len(prompt.encode())
        if codec is None or (
            (codec.context is None or max_tokens < codec.context) and (room is None or max_tokens + new_tokens <= room)
        ):
            return None
        try:
            tokens = len(codec.encode(prompt))
        except PromptError as error:
            return f"prompt: {error}"
        if room is None or codec.max_total_tokens(tokens, new_tokens) <= room:
            return None
        return (
            f"prompt: its {tokens} tokens and {new_tokens} new ones (max_new_tokens) are more than the {room} that"
            f" models.{self._name}.text_memory holds, {self._model.text_bytes} bytes: shorten it, or ask for fewer"
        )


class LanguageReports(Protocol):
    def token(self, text: Generation, index: int, piece: str) -> None: ...

    def text_finished(self, ended: Generation) -> None: ...


#: Opens a model with the given bytes for its experts; the callbacks get its progress and each streamed token.
OpenModelWith = Callable[[Model, int, Callable[[], None], Callable[[Generation, int, str], None]], "ServedModel"]


class LanguageModels:
    """All models of a configuration. `generate` from any thread; `start` names the receiver of their reports."""

    _reports: LanguageReports

    def __init__(
        self,
        config: Config,
        drive: Drive,
        pools: Sequence[Pool],
        open_model: OpenModelWith,
    ) -> None:
        self._config = config
        self._clock = time.monotonic
        self._looked_s, self._ran_s = self._clock(), 0.0
        self._drive = drive
        self._pools = pools
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._log: Any = structlog.get_logger("language")
        self.threads = {
            name: ModelThread(
                name,
                lambda budget_bytes, gets_on, model=model: open_model(model, budget_bytes, gets_on, self._token),
                model.memory,
                on_outcome=self._finish,
                images_under_way=self._images_under_way,
                hang_after_s=config.limits.hang_after,
                ran=lambda: self._ran_s,
            )
            for name, model in config.models.items()
        }
        self.prompts = {name: Prompts(name, model, self.threads[name]) for name, model in config.models.items()}
        self._devices = shared_devices(config)
        self._thread = threading.Thread(target=self._run, name="language", daemon=True)

    def start(self, reports: LanguageReports) -> None:
        self._reports = reports
        for thread in self.threads.values():
            thread.start()
        if self.threads:
            self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Let running steps end; requests without a result stay accepted, for the next start."""
        until_s = self._clock() + timeout_s
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        for thread in self.threads.values():
            thread.stop(max(0.0, until_s - self._clock()))

    def generate(self, texts: Sequence[Generation]) -> None:
        """Hand durable requests to their models; end those whose model a restart removed."""
        for text in texts:
            thread = self.threads.get(text.model)
            if thread is None:
                waited_s = self._clock() - text.accepted_s
                self._finish(replace(text, reason="unknown_model", total_ms=waited_s * 1000))
            else:
                thread.generate(text)

    def _finish(self, ended: Generation) -> None:
        self._reports.text_finished(ended)

    def _token(self, text: Generation, index: int, piece: str) -> None:
        self._reports.token(text, index, piece)

    @property
    def is_failing(self) -> bool:
        return any(thread.is_failing for thread in self.threads.values())

    def trouble(self) -> str | None:
        failing = (thread for thread in self.threads.values() if thread.is_failing)
        return next((f"model {thread.name}: {thread.last_error}" for thread in failing), None)

    @property
    def is_opening(self) -> bool:
        return any(thread.is_opening for thread in self.threads.values())

    def unopened(self) -> list[str]:
        closed = [thread for thread in self.threads.values() if thread.is_opening or thread.is_failing]
        return [f"model {thread.name}: {' '.join((thread.last_error or 'still opens').split())}" for thread in closed]

    def status(self) -> list[dict[str, Any]]:
        models = self._config.models
        return [{"device": models[name].device, **thread.status()} for name, thread in self.threads.items()]

    def limit(self, limits: Any, ask: Callable[[dict[str, Any] | None], dict[str, Any]]) -> dict[str, Any]:
        """Change budgets of devices, by `ask`, the drive's `limits`. Raises ControlError as the drive does.

        Models keep their memory until the next poll: until then the images' pools take the whole difference.
        """
        if not isinstance(limits, dict | None):
            return ask(limits)
        limits = limits or {}
        with self._lock:
            shared = {device.name: device for device in self._devices}
            for_images = {
                name: self._left_for_images(shared[name], size) if name in shared else size
                for name, size in limits.items()
            }
            answer = ask(for_images)
            now = dict(answer["expert_memory"])
            for name, device in shared.items():
                if name in limits:
                    device.lease.total_bytes = limits[name] - device.reserved_bytes
                    device.ordered_bytes, device.refused_bytes = now[name], None
                now[name] = device.lease.total_bytes + device.reserved_bytes
        return {**answer, "expert_memory": now}

    # Memory

    def _left_for_images(self, shared: SharedDevice, total_bytes: Any) -> Any:
        if type(total_bytes) is not int:
            return total_bytes  # the drive says what is wrong with it
        held_bytes = shared.reserved_bytes + sum(self.threads[model].held_bytes for model in shared.models)
        if total_bytes <= held_bytes:
            raise ControlError("does_not_fit", f"language models hold {held_bytes} bytes of {shared.name}")
        return total_bytes - held_bytes

    def _images_under_way(self) -> bool:
        return self._drive.images_under_way > 0

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            try:
                self._look_for_hangs()
                for shared in self._devices:
                    self._move_memory(shared)
            except Exception:  # noqa: BLE001  models and images go on with what they have
                self._log.exception("language_defect")

    def _look_for_hangs(self) -> None:
        before_s, self._looked_s = self._looked_s, self._clock()
        self._ran_s += min(self._looked_s - before_s, _MAX_BETWEEN_LOOKS_S)
        for thread in self.threads.values():
            seconds = thread.hangs_s()
            if seconds is not None:
                thread.give_up(f"a step of model {thread.name} did not get on for {seconds:.0f} s")

    def _move_memory(self, shared: SharedDevice) -> None:
        under_way = self._images_under_way()
        lack_room = under_way and self._images_lack_room(shared)
        with self._lock:
            while not self._stopping.is_set():
                grant = shared.lease.next_grant(
                    self._held(shared), self._clock(), images_under_way=under_way, images_lack_room=lack_room
                )
                if grant is None or not self._carry_out(shared, grant):
                    return

    def _held(self, shared: SharedDevice) -> Held:
        pools_bytes = sum(pool.budget_bytes for pool in self._pools if pool.device == shared.name)
        models = {model: self.threads[model].held_bytes for model in shared.models}
        return Held(max(pools_bytes, shared.ordered_bytes), models)

    def _carry_out(self, shared: SharedDevice, grant: Grant) -> bool:
        if grant.model is None:
            return self._to_images(shared, grant.budget_bytes)
        return self._to_model(shared, grant.model, grant.budget_bytes)

    def _to_model(self, shared: SharedDevice, model: str, budget_bytes: int) -> bool:
        thread = self.threads[model]
        before_bytes = thread.held_bytes
        try:
            thread.resize(budget_bytes).result(_ANSWER_S)
        except TimeoutError:
            return False  # amid a long step: it counts as held until it is done
        except Exception as error:  # noqa: BLE001  too little for the mode, or more than the machine has
            self._log.warning("model_keeps_its_memory", model=model, bytes=before_bytes, error=str(error))
            if budget_bytes < before_bytes:
                shared.lease.cannot_shrink(model, before_bytes)
            else:
                shared.lease.cannot_grow(model, self._clock())
            return True
        self._log.info("memory_moved", device=shared.name, to=model, bytes=budget_bytes)
        return True

    def _to_images(self, shared: SharedDevice, budget_bytes: int) -> bool:
        if budget_bytes == shared.ordered_bytes:
            return False  # under way: residents that are in use go when they are idle
        if budget_bytes == shared.refused_bytes and self._clock() < shared.refused_until_s:
            return False
        try:
            self._asked("limits", {"expert_memory": {shared.name: budget_bytes}})
        except TimeoutError:
            # The drive is busy and will still do it: a smaller budget counts once it holds, a larger one from now on.
            shared.ordered_bytes = max(shared.ordered_bytes, budget_bytes)
            return False
        except ControlError as error:
            self._log.info("memory_not_moved", reason=error.reason)
            shared.refused_bytes, shared.refused_until_s = budget_bytes, self._clock() + _REFUSED_FOR_S
            return False
        shared.ordered_bytes, shared.refused_bytes = budget_bytes, None
        self._log.info("memory_moved", device=shared.name, to="images", bytes=budget_bytes)
        return True

    def _images_lack_room(self, shared: SharedDevice) -> bool:
        """Return True if images wait for an expert that does not fit in this device's pools now."""
        try:
            status, experts = self._asked("status", {}), self._asked("experts", {})
        except (ControlError, TimeoutError):
            return False
        rows = [row for row in status["executors"] if row["device"] == shared.name]
        free_bytes = max((row["budget_bytes"] - row["used_bytes"] for row in rows), default=0)
        switched = status["expert_switches"] > shared.switches
        shared.switches = status["expert_switches"]
        absent = [row for row in experts["experts"] if not row["resident"] and row["bytes"] > free_bytes]
        return any(row["queued"] for row in absent) or (switched and bool(absent))

    def _asked(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ControlError if the drive refuses, TimeoutError if it is busy."""
        return self._drive.ask_later(kind, fields).result(_ANSWER_S)
