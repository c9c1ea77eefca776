"""Any pydantic model against any document: every error with its place, in words of the file, not of Python."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from routing_rules.load import read_yaml_text, validate


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Device(Strict):
    budget_mb: int = Field(gt=0)
    executors: int = 1
    tier: Literal["ram", "disk"] = "disk"


class Settings(Strict):
    rules: Path
    limit: float | None = Field(default=None, ge=0, le=1)
    devices: dict[str, Device] = {}
    endpoints: list[str] = []
    fallback: Device | None = None
    either: Device | int | None = None
    exit_label: str = Field(default="ok", alias="pass")


def test_a_right_document_becomes_the_model() -> None:
    settings, problems = validate(Settings, read_yaml_text("rules: r.yaml\ndevices: {cpu: {budget_mb: 5}}\n", "c"))
    assert problems == []
    assert settings is not None
    assert settings.devices["cpu"].budget_mb == 5


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        # Keys: the nearest right name at any depth, the file's name of an alias, a list where none is near.
        ("rules: r\nfalback: {budget_mb: 1}", ["2:1: unknown key `falback`; did you mean `fallback`?"]),
        ("rules: r\ndevices: {cpu: {budget_mb: 1, executers: 2}}",
         ["2:31: unknown key `executers`; did you mean `executors`?"]),
        ("rules: r\ndevices: {cpu: {budget_mb: 1, zzz: 1}}",
         ["2:31: unknown key `zzz`; expected one of `budget_mb`, `executors`, `tier`"]),
        # A missing key is shown at its parent; a misspelt one is one mistake, not two.
        ("rules: r\ndevices:\n  cpu: {tier: ram}", ["3:3: missing key `budget_mb`"]),
        ("ruels: r", ["1:1: unknown key `ruels`; did you mean `rules`?"]),
        ("", ["1:1: missing key `rules`"]),
        # Values: what was expected, and what stands there, as written.
        ("rules: r\nlimit: 1.50\nendpoints: tcp",
         ["2:8: expected a number ≤ 1.0, found `1.50`", "3:12: expected a list, found `tcp`"]),
        ("rules: r\ndevices: {cpu: {budget_mb: many}}", ["2:28: expected a whole number, found `many`"]),
        ("rules: r\ndevices: {gpu: {budget_mb: 0, tier: tape}}",
         ["2:28: expected a number > 0, found `0`", "2:37: expected 'ram' or 'disk', found `tape`"]),
        ("rules: r\nendpoints: [0402]", ["2:13: expected text, found `0402`; put it in quotes"]),
        ("rules: r\neither: [1]",
         ["2:9: expected a mapping (`key: value` lines) or a whole number, found a list"]),
        ("[1, 2]", ["1:1: expected a mapping (`key: value` lines), found a list"]),
        # Mistakes of YAML itself come with the others, in the order of the file.
        ("rules: r\nlimit: 3\nrules: x",
         ["2:8: expected a number ≤ 1.0, found `3`",
          "3:1: duplicate key `rules`: it is already in line 1; keep one of them"]),
    ],
)  # fmt: skip
def test_every_error_has_its_place_and_words_of_the_file(text: str, problems: list[str]) -> None:
    _, reported = validate(Settings, read_yaml_text(text, "c.yaml"))
    assert list(map(str, reported)) == [f"c.yaml:{problem}" for problem in problems]
