"""Any pydantic model against any document: every error with its place, in words of the file, not of Python."""

from pathlib import Path
from typing import Literal

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


def problems_of(text: str) -> list[str]:
    return [str(problem) for problem in validate(Settings, read_yaml_text(text, "c.yaml"))[1]]


def test_a_right_document_becomes_the_model() -> None:
    settings, problems = validate(Settings, read_yaml_text("rules: r.yaml\ndevices: {cpu: {budget_mb: 5}}\n", "c"))
    assert problems == []
    assert settings is not None
    assert settings.devices["cpu"].budget_mb == 5


def test_unknown_keys_get_the_nearest_right_name_at_any_depth() -> None:
    text = "rules: r\nfalback: {budget_mb: 1}\ndevices:\n  cpu: {budget_mb: 1, executers: 2}\n"
    assert problems_of(text) == [
        "c.yaml:2:1: unknown key `falback`; did you mean `fallback`?",
        "c.yaml:4:23: unknown key `executers`; did you mean `executors`?",
    ]


def test_unknown_keys_are_named_inside_optional_models_and_unions_too() -> None:
    assert problems_of("rules: r\nfallback: {budget_mb: 1, teir: ram}\n") == [
        "c.yaml:2:26: unknown key `teir`; did you mean `tier`?"
    ]
    assert "c.yaml:2:24: unknown key `teir`; did you mean `tier`?" in problems_of(
        "rules: r\neither: {budget_mb: 1, teir: ram}\n"
    )


def test_an_alias_is_what_the_file_calls_the_field() -> None:
    assert problems_of("rules: r\npas: x\n") == ["c.yaml:2:1: unknown key `pas`; did you mean `pass`?"]


def test_a_key_like_no_other_gets_the_list_of_those_that_are_possible() -> None:
    assert problems_of("rules: r\ndevices: {cpu: {budget_mb: 1, zzz: 1}}") == [
        "c.yaml:2:31: unknown key `zzz`; expected one of `budget_mb`, `executors`, `tier`"
    ]


def test_a_missing_key_is_shown_at_its_parent() -> None:
    assert problems_of("rules: r\ndevices:\n  cpu: {tier: ram}\n") == ["c.yaml:3:3: missing key `budget_mb`"]


def test_a_misspelt_key_is_one_mistake_not_two() -> None:
    assert problems_of("ruels: r\n") == ["c.yaml:1:1: unknown key `ruels`; did you mean `rules`?"]


def test_values_are_refused_with_what_was_expected_and_what_stands_there() -> None:
    text = "rules: r\nlimit: 1.50\nendpoints: tcp\ndevices: {cpu: {budget_mb: many}, gpu: {budget_mb: 0, tier: tape}}\n"
    assert problems_of(text) == [
        "c.yaml:2:8: expected a number ≤ 1.0, found `1.50`",
        "c.yaml:3:12: expected a list, found `tcp`",
        "c.yaml:4:28: expected a whole number, found `many`",
        "c.yaml:4:52: expected a number > 0, found `0`",
        "c.yaml:4:61: expected 'ram' or 'disk', found `tape`",
    ]


def test_text_that_looks_like_a_number_needs_quotes_and_is_shown_as_written() -> None:
    assert problems_of("rules: r\nendpoints: [0402]\n") == [
        "c.yaml:2:13: expected text, found `0402`; put it in quotes"
    ]


def test_members_of_a_union_become_one_sentence() -> None:
    assert problems_of("rules: r\neither: [1]\n") == [
        "c.yaml:2:9: expected a mapping (`key: value` lines) or a whole number, found a list"
    ]


def test_an_empty_file_lacks_its_keys() -> None:
    assert problems_of("") == ["c.yaml:1:1: missing key `rules`"]


def test_a_list_instead_of_a_mapping_is_said_once() -> None:
    assert problems_of("[1, 2]") == ["c.yaml:1:1: expected a mapping (`key: value` lines), found a list"]


def test_mistakes_of_yaml_itself_come_with_the_others_in_the_order_of_the_file() -> None:
    assert problems_of("rules: r\nlimit: 3\nrules: x\n") == [
        "c.yaml:2:8: expected a number ≤ 1.0, found `3`",
        "c.yaml:3:1: duplicate key `rules`: it is already in line 1; keep one of them",
    ]


def test_an_unreadable_document_is_no_model() -> None:
    settings, problems = validate(Settings, read_yaml_text("a: [", "c.yaml"))
    assert settings is None
    assert len(problems) == 1
