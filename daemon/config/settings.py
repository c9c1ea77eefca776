"""`coserve.yaml`: the file that names all parts of a line. docs/configuration.md says what each key means."""

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from daemon.config.plant_time import PlantTime, clock_time, shift_name, timezone_name
from daemon.consumers.kinds import CONSUMER_KEYS, CONSUMER_NAME, AnyConsumer, consumer_mistakes
from daemon.consumers.protocol import placed
from daemon.errors import ConfigError
from daemon.units import Bytes, Count, Seconds, between, parse_seconds, size_text
from daemon.wire.messages import KEY, NAME, NAME_EXPECTED, shown
from daemon.wire.sockets import ipc_problem
from experts.moe.modes import MODES
from routing_rules.load import Document, KeyPath, Problem, nearest, read_yaml, read_yaml_text, salvage
from routing_rules.routes import GUARDS

#: Placeholder in `security` for the folder where systemd puts the secrets of `LoadCredential=`.
CREDENTIALS = "$CREDENTIALS_DIRECTORY"
#: The names that PROTOCOL.md allows in a request, without characters that are special to a shell.
_MODEL_NAME = r"^[A-Za-z0-9._:-]{1,128}$"
_DATABASE = "sqlite:///inspection.db"
#: A processor of a PC; others have a name of their own, and a `host`.
_OWN_DEVICE = r"^(cpu|cuda:\d+)$"
#: Name of a worker of the cluster, and address of the cluster's head.
HOST_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_HOST = HOST_NAME.removesuffix("$") + r"(/(cpu|cuda:\d+))?$"
CLUSTER_ADDRESS = r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}$"
DEVICE_NAME = r"^(cpu|cuda:\d+|[a-z][a-z0-9-]{0,62})$"
#: A password in an address.
_PASSWORD = re.compile(r"(://[^:/@\s]*:)\S*(?=@)|((?:password|token|secret)=)[^&\s\"]*", re.IGNORECASE)


def http_endpoint(value: str) -> str:
    if re.fullmatch(r"http://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}", value) is None:
        raise ValueError(
            f"expected http://ADDRESS:PORT such as http://127.0.0.1:9470 (TLS: docs/security.md), not {value!r}"
        )
    return value


def absolute_file(given: Path, folder: Path, environ: Mapping[str, str]) -> Path:
    """Make a path absolute. An unset $CREDENTIALS_DIRECTORY stays: only a start needs it."""
    return folder / str(given).replace(CREDENTIALS, environ.get(CREDENTIALS[1:]) or CREDENTIALS)


def absolute_database(value: str, folder: Path) -> str:
    scheme, separator, rest = value.partition("://")
    if not separator or scheme != "sqlite":  # the rest may hold a password, and is not repeated
        raise ValueError(
            f"a line keeps its results in a SQLite file: expected sqlite:///FILE, for example sqlite:///inspection.db,"
            f" not {scheme!r}; a plant's PostgreSQL gets them through the consumer `plant` (docs/plant.md)"
        )
    file = rest.removeprefix("/")
    if file in ("", ":memory:"):
        raise ValueError("expected a file, for example sqlite:///inspection.db: results in memory are lost")
    return f"sqlite:///{folder / file}"


def absolute_endpoint(value: str, folder: Path, environ: Mapping[str, str]) -> str:
    if value.startswith("tcp://"):
        if re.fullmatch(r"tcp://[^:/]+(:\d{1,5}|:\*)|tcp://\[[0-9a-fA-F:]+\]:(\d{1,5}|\*)", value) is None:
            raise ValueError(f"expected tcp://ADDRESS:PORT, not {value!r}")
        return value
    if not value.startswith("ipc://"):
        raise ValueError(f"expected an endpoint such as ipc://run/intake.sock or tcp://127.0.0.1:5570, not {value!r}")
    runtime = environ.get("RUNTIME_DIRECTORY") or str(folder / "run")
    path = folder / value.removeprefix("ipc://").replace("$RUNTIME_DIRECTORY", runtime)
    problem = ipc_problem(str(path))
    if problem:
        raise ValueError(problem)
    return f"ipc://{path}"


class _ConfigSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Endpoints(_ConfigSection):
    """Addresses that the daemon binds (PROTOCOL.md, Sockets). Without `$RUNTIME_DIRECTORY` sockets lie in `run/`."""

    intake: Annotated[list[str], Field(min_length=1)] = ["ipc://$RUNTIME_DIRECTORY/intake.sock", "tcp://127.0.0.1:5570"]
    results: str = "tcp://127.0.0.1:5571"
    control: str = "ipc://$RUNTIME_DIRECTORY/control.sock"
    http: Annotated[str, AfterValidator(http_endpoint)] | None = None


class Device(_ConfigSection):
    """One processor. Omitted keys come from `profile`, else these defaults; `expert_memory` has no default.

    A GPU with `memory: shared` computes in host memory: its `expert_memory` is part of the CPU's. `host` is a worker of
    the cluster, with its processor: `pc2/cuda:0`.
    """

    expert_memory: Bytes = 0
    executors: Count = 1
    threads: Count = 1
    max_batch: Count = 8
    activation_memory: Bytes | None = None
    host_cache: Bytes | None = None
    memory: Literal["own", "shared"] = "own"
    profile: Path | None = None
    host: Annotated[str, Field(pattern=_HOST)] | None = None

    @property
    def worker(self) -> str:
        """The cluster's worker that has this device; "" for a device of this PC."""
        return (self.host or "").partition("/")[0]

    @property
    def processor(self) -> str:
        return (self.host or "").partition("/")[2] or "cuda:0"


if TYPE_CHECKING:
    ModeName = str
else:
    ModeName = Literal[tuple(MODES)]


class Model(_ConfigSection):
    """A language model: `checkpoint` is its folder in Hugging Face format, `options` are the mode's own."""

    checkpoint: Path
    mode: ModeName = "lookahead"
    device: str = "cpu"
    memory: Bytes
    least_memory: Bytes | None = None
    text_memory: Bytes | None = None
    storage: Literal["auto", "checkpoint", "exact", "int8", "int4"] = "auto"
    options: dict[str, Any] = {}
    rows: Count = 8
    max_new_tokens: Count = 256
    tasks: list[str] = []

    @property
    def least_bytes(self) -> int:
        return min(self.memory, self.memory // 4 if self.least_memory is None else self.least_memory)

    @property
    def text_bytes(self) -> int:
        return self.memory // 4 if self.text_memory is None else self.text_memory


class Limits(_ConfigSection):
    """Back-pressure in counts and bytes; a source that has more than its share of the backlog gets `busy`."""

    backlog_images: Count = 20_000
    backlog_bytes: Bytes = 8 * 2**30
    source_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    credit: Count = 256
    max_payload_bytes: Bytes = 64 * 2**20
    max_pixels: Count = 64_000_000
    max_wait: Seconds = 20.0
    in_memory: Bytes = 512 * 2**20
    hang_after: Seconds = 30.0


class Retention(_ConfigSection):
    """Images kept after their verdict, the age of images and results, and the disk space kept free."""

    keep: list[Literal["pass", "fail", "review", "unknown"]] = ["fail", "review", "unknown"]
    good_examples: Annotated[int, Field(ge=0, le=100)] = 3
    sample: Annotated[float, Field(ge=0, le=1)] = 0.0
    images_for: Seconds | None = None
    images_bytes: Bytes | None = None
    free: Bytes | None = None
    results_for: Seconds | None = None


def _switch(value: object) -> object:
    """Read `on` and `off`, which YAML 1.2 leaves as text; `0`, `off` and `false` mean the same."""
    if isinstance(value, str):
        return {"on": True, "off": False}.get(value.lower(), value)
    return False if value == 0 else value


def _seconds_or_off(value: object) -> float:
    return 0.0 if _switch(value) is False else parse_seconds(value)


Switch = Annotated[Literal[True, False], BeforeValidator(_switch)]


class Guards(_ConfigSection):
    """Rules that turn a `pass` into `review`, or a picture of a closed board into a new attempt (PROTOCOL.md, 1.2)."""

    repeated_picture: Annotated[
        Literal[False] | Annotated[int, Field(strict=True, ge=1, le=100_000)], BeforeValidator(_switch)
    ] = 1000
    retest_after: Annotated[float, BeforeValidator(_seconds_or_off)] = 2.0
    picture_quality: Switch = True
    unlike_training: Switch = True
    may_repeat: list[Annotated[str, Field(pattern=rf"^(\*|{KEY.pattern})$")]] = []

    @property
    def switched_on(self) -> list[str]:
        return [guard for guard in GUARDS if getattr(self, guard)]


class PlantClock(_ConfigSection):
    timezone: Annotated[str, AfterValidator(timezone_name)] | None = None
    shifts: dict[Annotated[str, AfterValidator(shift_name)], Annotated[str, AfterValidator(clock_time)]] = {}
    yield_goal: Annotated[float, Field(gt=0, le=1)] | None = None

    def clock(self) -> PlantTime:
        starts = tuple((name, time.fromisoformat(at)) for name, at in self.shifts.items())
        return PlantTime(self.timezone or "UTC", starts)


class Plant(PlantClock):
    signers: Annotated[list[Path], Field(max_length=64)] = []


class ClusterSettings(_ConfigSection):
    """The Ray cluster of devices on other PCs: `address` of its head, `token` file of its secret."""

    address: Annotated[str, Field(pattern=CLUSTER_ADDRESS)] | None = None
    token: Path | None = None


class StopSettings(_ConfigSection):
    """Work before a stop: the running batches, or for `backlog_for` the whole backlog."""

    backlog_for: Annotated[Seconds, between(0.0, 3600.0, "of 1h at most")] | None = None

    @property
    def longest_s(self) -> float:
        return 12.0 if self.backlog_for is None else self.backlog_for


class Security(_ConfigSection):
    """CURVE for intake and results over TCP, the bearer token of `endpoints.http`, folders of weights."""

    server_key: Path | None = None
    allowed_clients: Path | None = None
    http_token: Path | None = None
    weights: list[Path] = []


_ABSENT = object()
#: Sections whose entries have names of their own, with the keys of an entry.
_NAMED = {"devices": Device.model_fields.keys(), "models": Model.model_fields.keys(), "consumers": CONSUMER_KEYS}


def _line_name(name: str) -> str:
    if not NAME.fullmatch(name) or not name.strip():
        raise ValueError(f"expected {NAME_EXPECTED}, got {shown(name)}")
    return name


class Config(_ConfigSection):
    """A resolved line: paths absolute, endpoints expanded. `line` is the name that its results carry."""

    line: Annotated[str, AfterValidator(_line_name)] = Field(default_factory=socket.gethostname)

    endpoints: Endpoints = Endpoints()
    database: str = _DATABASE
    journal: Path = Path("journal")
    rules: Path
    catalog: Path
    images: Path = Path("images")
    devices: Annotated[dict[Annotated[str, Field(pattern=DEVICE_NAME)], Device], Field(min_length=1)]
    cluster: ClusterSettings = ClusterSettings()
    policy: str = "coserve-plus"
    limits: Limits = Limits()
    retention: Retention = Retention()
    guards: Guards = Guards()
    plant: Plant = Plant()
    stop: StopSettings = StopSettings()
    models: dict[Annotated[str, Field(pattern=_MODEL_NAME)], Model] = {}
    consumers: dict[Annotated[str, Field(pattern=CONSUMER_NAME)], AnyConsumer] = {}
    security: Security = Security()
    record: Path | None = None

    @property
    def quarantine(self) -> Path:
        return self.journal.parent / "quarantine"

    @property
    def positions(self) -> Path:
        return self.journal.parent / "consumers"

    @property
    def alarms(self) -> Path:
        return self.positions / "alarms.json"

    @property
    def logged_out(self) -> Path:
        return self.journal.parent / "logged_out"


def load_config(path: Path, environ: Mapping[str, str] = os.environ) -> Config:
    """Read, override, validate and resolve `path`; ConfigError names every mistake with its line."""
    config, problems, _ = sound_config(path, environ)
    if config is None or problems:
        raise ConfigError(problems)
    return config


def sound_config(path: Path, environ: Mapping[str, str] = os.environ) -> tuple[Config | None, list[Problem], set[str]]:
    """Return the sound part of `path`, every mistake with its line, and the sections that lost a part."""
    document, problems = read_settings(path, environ)
    config, mistakes, removed = salvage(Config, document)
    problems += mistakes
    if config is None:
        return None, problems, set()
    resolved, contradictions = _resolve(config, path.resolve().parent, document, environ)
    for place, message in contradictions:
        if not any(gone[: len(place)] == place for gone in removed):  # else it follows from the part taken out
            problems.append(document.problem(place, message))
    return resolved, problems, {str(gone[0]) for gone in removed}


def read_settings(path: Path, environ: Mapping[str, str] = os.environ) -> tuple[Document, list[Problem]]:
    """Return unchecked settings of `path` and the environment, and mistakes; ConfigError if there are none."""
    document = read_yaml(path)
    if not isinstance(document.data, dict):
        expected = Problem(str(path), 1, 1, "expected a mapping with keys such as rules, catalog and devices")
        raise ConfigError(document.problems or [expected])
    return document, _override(document, environ)


def stated_settings(path: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the settings that file and environment state: JSON by dotted key, without passwords."""
    return dict(_leaves(read_settings(path, environ)[0].data, ()))


def _leaves(value: Any, at: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*at, str(key)))
    else:
        yield ".".join(at), _PASSWORD.sub(r"\1\2***", json.dumps(value, ensure_ascii=False, default=str))


def at_their_lines(path: Path, mistakes: Sequence[tuple[KeyPath, str]]) -> list[str]:
    """Prefix each mistake in settings that were read before with its line in `path`."""
    try:
        document = read_settings(path)[0] if mistakes else None
    except ConfigError:
        document = None
    return [str(document.problem(key, text) if document else Problem(str(path), 1, 1, text)) for key, text in mistakes]


def at_their_keys(path: Path, mistakes: Sequence[str]) -> list[str]:
    """Return mistakes that begin with their key (`endpoints.http: …`), each with its line."""
    return at_their_lines(path, [(tuple(text.partition(":")[0].split(".")), text) for text in mistakes])


def at_their_paths(path: Path, config: Config, problems: Sequence[Problem | str]) -> list[str]:
    """Return mistakes as texts; one about an unreadable file begins with the key in `path` that names it."""
    keys: dict[str, KeyPath] = {}

    def note(key: KeyPath, file: Path) -> Path:
        keys.setdefault(str(file), key)
        return file

    placed(config, note)
    named = [(keys.get(str(each).partition(": cannot read the file")[0]), str(each)) for each in problems]
    return [
        at_their_lines(path, [(key, f"{'.'.join(map(str, key))}: {text}")])[0] if key else text for key, text in named
    ]


def _resolve(
    config: Config, folder: Path, document: Document, environ: Mapping[str, str]
) -> tuple[Config, list[tuple[KeyPath, str]]]:
    mistakes: list[tuple[KeyPath, str]] = []

    def endpoint(key: str, value: str) -> str:
        try:
            return absolute_endpoint(value, folder, environ)
        except ValueError as error:
            mistakes.append((("endpoints", key), str(error)))
            return value

    given = config.endpoints
    update: dict[str, Any] = {"intake": [endpoint("intake", value) for value in given.intake]}
    update |= {key: endpoint(key, getattr(given, key)) for key in ("results", "control")}
    if not update["control"].startswith("ipc://"):
        mistakes.append((("endpoints", "control"), "control is reached over ipc only: ipc://PATH"))
    try:
        database = absolute_database(config.database, folder)
    except ValueError as error:
        mistakes.append((("database",), str(error)))
        database = absolute_database(_DATABASE, folder)  # so that the mistake is reported once
    mistakes += _contradictions(config, document.keys(("devices",)))
    update = {"endpoints": given.model_copy(update=update), "database": database}
    return placed(config.model_copy(update=update), lambda _, file: absolute_file(file, folder, environ)), mistakes


def _contradictions(config: Config, devices_written: Sequence[str]) -> Iterator[tuple[KeyPath, str]]:
    """Yield contradictions within the settings; a device taken out as wrong is reported already."""
    remote: dict[tuple[str, str], str] = {}
    for name, device in config.devices.items():
        for keys, message in _device_mistakes(name, device):
            yield ("devices", name, *keys), message
        at = device.worker, device.processor
        if device.host is not None and (first := remote.setdefault(at, name)) != name:
            message = f"{device.processor} of {device.worker} is already {first}: name another, or remove this one"
            yield ("devices", name, "host"), message
        for keys, message in _host_mistakes(name, device, config.cluster.address):
            yield ("devices", name, *keys), message
    for name, model in config.models.items():
        if model.device in config.devices or model.device not in devices_written:
            for key, message in _model_mistakes(model, config.devices):
                yield ("models", name, key), message
    for path, message in consumer_mistakes(config.line, config.consumers):
        yield ("consumers", *path), message
    yield from _shift_mistakes(config.plant)
    if (config.security.server_key is None) != (config.security.allowed_clients is None):
        yield ("security",), "CURVE needs both server_key and allowed_clients"


def _device_mistakes(name: str, device: Device) -> Iterator[tuple[KeyPath, str]]:
    if not device.expert_memory and device.profile is None:
        missing = "missing key `expert_memory` (or a `profile` that has it): bytes for experts, such as 2GB"
        yield (), missing
    if device.host_cache is not None and (name == "cpu" or device.memory == "shared"):
        message = f"the experts of {name} are in RAM already: remove host_cache, or raise expert_memory"
        yield ("host_cache",), message
    if device.memory == "shared" and name == "cpu":
        yield ("memory",), "only a GPU can have `memory: shared`, which is a part of the CPU's: remove it here"
    elif device.memory == "shared" and not device.expert_memory and device.profile is not None:
        message = "a profile does not divide the CPU's memory: write expert_memory beside `memory: shared`"
        yield ("memory",), message


def _host_mistakes(name: str, device: Device, address: str | None) -> Iterator[tuple[KeyPath, str]]:
    is_own_name, other = re.fullmatch(_OWN_DEVICE, name) is not None, f"{device.worker}-gpu"
    if device.host is None:
        if not is_own_name:
            yield (), f"{name} is not a device of this PC: expected cpu or cuda:0, or the `host` that it is on"
        return
    if is_own_name:
        yield ("host",), f"{name} is a device of this PC: give one of another PC a name of its own, such as {other}"
    elif name == "ram":
        yield ("host",), f"{name} is the memory of this PC: give the device another name, such as {other}"
    elif address is None:
        yield ("host",), "a device of another PC needs `cluster.address`, that of its head"
    for key in ("host_cache", "memory"):
        if key in device.model_fields_set:
            yield (key,), "is for GPUs of this PC: remove it"


def _shift_mistakes(plant: Plant) -> Iterator[tuple[KeyPath, str]]:
    first: dict[str, str] = {}
    for name, start in plant.shifts.items():
        if first.setdefault(start, name) != name:
            message = f"begins at {start}, as {first[start]} does: a shift lasts until the next one begins"
            yield ("plant", "shifts", name), message


def _model_mistakes(model: Model, devices: Mapping[str, Device]) -> Iterator[tuple[str, str]]:
    if model.device not in devices:
        yield "device", f"{model.device!r} is not one of `devices`: {', '.join(devices)}"
        return
    if devices[model.device].host is not None:
        yield "device", f"{model.device} is on another PC, and language models run on this one"
        return
    if model.least_memory is not None and model.least_memory > model.memory:
        yield "least_memory", f"{size_text(model.least_memory)} are more than `memory`, {size_text(model.memory)}"


class StartSettings:
    """The settings at the start, to compare the file with later: a reload reads no setting again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at_start = load_config(path)

    def changed(self) -> tuple[list[str], list[str]]:
        """Return the changed keys, and why the file cannot be read: one of the two is empty.

        Keys are paths such as `devices.cpu.executors` in file order; an added or removed section is its name.
        """
        try:
            now = load_config(self._path)
        except ConfigError as error:
            return [], str(error).splitlines()
        return list(_differences(self._at_start.model_dump(), now.model_dump(), ())), []


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], at: tuple[str, ...]) -> Iterator[str]:
    for key in {**before, **now}:
        was, is_now = before.get(key, _ABSENT), now.get(key, _ABSENT)
        if isinstance(was, dict) and isinstance(is_now, dict):
            yield from _differences(was, is_now, (*at, key))
        elif was != is_now:
            yield ".".join((*at, key))


_PREFIX = "COSERVE_"
#: A variable with this prefix that is not a setting: the command line's default for the file.
_NOT_A_SETTING = "COSERVE_CONFIG"
#: Devices that a variable may add to the file.
_OWN_DEVICES = ("cpu", *(f"cuda:{number}" for number in range(16)))


def is_setting(name: str) -> bool:
    return name.startswith(_PREFIX) and name != _NOT_A_SETTING


def _override(document: Document, environ: Mapping[str, str]) -> list[Problem]:
    """Put values of `environ`, such as the YAML text of `COSERVE_DATABASE`, into the data; return the mistakes."""
    problems: list[Problem] = []
    paths = _paths_by_variable(document.data)
    for name in sorted(filter(is_setting, environ)):
        path = paths.get(name.replace("__", "_").upper())
        if path is None:
            close = nearest(name, list(paths))
            hint = f"; did you mean {close}?" if close else ""
            problems.append(Problem(f"environment variable {name}", 1, 1, f"names no setting of coserve.yaml{hint}"))
            continue
        value = read_yaml_text(environ[name], f"environment variable {name}")
        if value.problems:
            problems += value.problems
            continue
        parent = document.data
        for key in path[:-1]:
            parent = parent.setdefault(key, {}) if isinstance(parent, dict) else {}
        parent[path[-1]] = value.data
        document.outside[path] = f"environment variable {name}"
    return problems


def _paths_by_variable(data: Mapping[str, Any]) -> dict[str, KeyPath]:
    """Return the key path of each environment variable that names a setting, such as `COSERVE_ENDPOINTS_RESULTS`."""
    paths: list[KeyPath] = []
    for top, field in Config.model_fields.items():
        section = field.annotation
        keys = section.model_fields if isinstance(section, type) and issubclass(section, BaseModel) else ()
        paths += [(top,), *((top, key) for key in keys)]
        given = data.get(top)
        # The file's own names last: of two that give one variable, that one is meant.
        names = [*(_OWN_DEVICES if top == "devices" else ()), *(given if isinstance(given, Mapping) else ())]
        paths += [(top, name, key) for name in names for key in _NAMED.get(top, ())]
    return {_PREFIX + re.sub("[:.-]", "_", "_".join(map(str, path))).upper(): path for path in paths}
