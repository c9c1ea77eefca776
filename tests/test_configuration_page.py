"""docs/configuration.md has every key of `coserve.yaml` once, with the default that the models have."""

import re
import socket
import types
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from daemon.config.settings import Config, load_config
from tests import ROOT

PAGE = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.+) \|$", PAGE, flags=re.MULTILINE)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a key holds, alone, by name, or one for each kind."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def keys_of(model: type[BaseModel], above: str = "") -> dict[str, FieldInfo]:
    keys: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        each = {"devices": "DEVICE.", "models": "MODEL.", "consumers": "CONSUMER."}.get(name, "")
        sections = models_in(field.annotation)
        for section in sections:
            keys |= keys_of(section, f"{above}{name}.{each}")
        if not sections:
            keys[above + name] = field
    return keys


KEYS = keys_of(Config)


def test_the_page_has_every_key_once_and_no_other():
    assert sorted(key for key, _, _ in ROWS) == sorted(KEYS)


@pytest.mark.parametrize(("key", "default"), [row[:2] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_default_on_the_page_is_the_models(key: str, default: str):
    field = KEYS[key]
    if field.is_required() or key.endswith(".expert_memory"):
        assert default.startswith("needed")
    elif key == "line":
        assert (field.default_factory, default) == (socket.gethostname, "the PC's host name")
    elif default.startswith("`"):
        value = TypeAdapter(field.rebuild_annotation()).validate_python(yaml.safe_load(default.strip("`")))
        assert value == field.default
    else:
        assert default in {"off", "none", "no limit", "for ever", "the PC's host name"}
        assert field.default is None or field.default_factory is not None


def test_the_shortest_configuration_of_the_page_is_one(tmp_path: Path):
    block = re.search(r"^```yaml\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert block
    (tmp_path / "coserve.yaml").write_text(block[1], encoding="utf-8")
    assert load_config(tmp_path / "coserve.yaml", {}).devices["cpu"].expert_memory == 2 * 10**9


def test_the_variables_of_the_page_name_settings(tmp_path: Path):
    text = "rules: a\ncatalog: b\ndevices:\n  cpu: {expert_memory: 2GB}\n  cuda:0: {expert_memory: 2GB}\n"
    (tmp_path / "coserve.yaml").write_text(text, encoding="utf-8")
    environ = dict(re.findall(r"`(COSERVE_\w+)=([^`]+)`", PAGE))
    assert len(environ) == 4
    config = load_config(tmp_path / "coserve.yaml", environ)
    assert (config.policy, config.limits.max_wait, config.devices["cuda:0"].max_batch) == ("samba", 5.0, 16)
