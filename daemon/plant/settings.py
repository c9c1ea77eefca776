"""`plant.yaml`: the file that describes a plant's hub. docs/plant.md says what each key means."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from daemon.config.settings import PlantClock, absolute_file, http_endpoint
from daemon.consumers.plant.settings import ONE_HOST, hub_database, line_name
from daemon.consumers.protocol import placed
from daemon.errors import ConfigError
from daemon.units import Bytes, Seconds
from daemon.wire.keys import read_password, read_token, unusable
from routing_rules.load import KeyPath, read_yaml, salvage

LineName = Annotated[str, AfterValidator(line_name)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _s3_place(value: str) -> str:
    bucket = value.removeprefix("s3://").partition("/")[0]
    if not value.startswith("s3://") or not bucket:
        raise ValueError(f"expected s3://BUCKET or s3://BUCKET/PREFIX, not {value!r}")
    return value


class Pictures(_Section):
    """The place of pictures: `folder`, or the bucket `s3` with the credentials of boto3."""

    folder: Path | None = None
    s3: Annotated[str, AfterValidator(_s3_place)] | None = None
    endpoint: str | None = None
    max_picture: Bytes = 64 * 2**20


class Retention(_Section):
    """Ages of results and pictures to keep, `lines` for results of single lines; number of `releases` of a name."""

    results: Seconds | None = None
    pictures: Seconds | None = None
    lines: dict[LineName, Seconds] = {}
    releases: Annotated[int, Field(ge=1)] | None = None


class LineKey(_Section):
    key: Path


class HubSettings(_Section):
    """A hub, resolved: paths absolute. `lines` are the lines that may send pictures."""

    database: Annotated[str, AfterValidator(partial(hub_database, scheme="postgresql+psycopg", hosts=ONE_HOST))]
    password: Path | None = None
    http: Annotated[str, AfterValidator(http_endpoint)] = "http://127.0.0.1:9480"
    http_token: Path | None = None
    pictures: Pictures = Pictures(folder=Path("pictures"))
    retention: Retention = Retention()
    lines: dict[LineName, LineKey] = {}
    releases: Path = Path("releases")
    silent_after: Seconds = 60.0
    plant: PlantClock = PlantClock()


def load_plant(path: Path, environ: Mapping[str, str] = os.environ) -> HubSettings:
    """Read, validate and resolve `path`; ConfigError names every mistake with its line."""
    document = read_yaml(path)
    settings, problems, _ = salvage(HubSettings, document)
    if settings is None:
        raise ConfigError(problems)
    folder = path.resolve().parent
    resolved: HubSettings = placed(settings, lambda _, file: absolute_file(file, folder, environ))
    problems += [document.problem(place, message) for place, message in _mistakes(resolved)]
    if problems:
        raise ConfigError(sorted(problems))
    return resolved


def _mistakes(settings: HubSettings) -> list[tuple[KeyPath, str]]:
    mistakes: list[tuple[KeyPath, str]] = []
    pictures = settings.pictures
    if (pictures.folder is None) == (pictures.s3 is None):
        mistakes.append((("pictures",), "needs either `folder` or `s3`"))
    if pictures.endpoint is not None and pictures.s3 is None:
        mistakes.append((("pictures", "endpoint"), "belongs to `s3`, which is missing"))
    secrets = (("password",), settings.password, read_password), (("http_token",), settings.http_token, read_token)
    mistakes += unusable(secrets)
    holders: dict[str, KeyPath] = {}
    if settings.http_token is not None and not mistakes:
        holders[read_token(settings.http_token).sign("")] = ("http_token",)
    for name, line in settings.lines.items():
        place: KeyPath = ("lines", name, "key")
        problems = unusable([(place, line.key, read_token)])
        other = place if problems else holders.setdefault(read_token(line.key).sign(""), place)
        if other != place:
            problems.append((place, f"is that of {'.'.join(map(str, other))} too: make a key for each"))
        mistakes += problems
    return mistakes
