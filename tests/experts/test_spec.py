"""The settings of an expert: the digest is that of everything beside the weights that an answer depends on."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.catalog import CatalogEntry, entry_with
from experts.spec import ArchitectureId, ExpertId, ExpertSpec, LayoutId, digest_of, setting_changes

SIZES = st.integers(32, 4096)
CLASSES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4, unique=True).map(tuple)
CHANNELS = st.tuples(*[st.floats(0.1, 1)] * 3)


def a_spec(task: str = "classify", **fields: Any) -> ExpertSpec:
    architecture = "resnet18" if task == "classify" else "yolo11n"
    values: dict[str, Any] = {
        "expert": ExpertId("P"),
        "architecture": ArchitectureId(architecture),
        "task": task,
        "file": Path("P.safetensors"),
        "classes": ("ok", "bad"),
        "input_size": 64,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.25, 0.25, 0.25),
        "sha256": "0" * 64,
        "layout": LayoutId(f"{architecture}-16-64-float32-channels_last-plain"),
        "weights_bytes": 4096,
    }
    return ExpertSpec(**(values | fields))


#: Fields of a spec that change answers, with other values, by task.
OTHERS = [
    *[(task, field, value) for task in ("classify", "detect") for field, value in (
        ("architecture", "resnet34"), ("classes", ("bad", "ok")), ("input_size", 96),
        ("mean", (0.5, 0.5, 0.4)), ("std", (0.2, 0.25, 0.25)),
        ("layout", "resnet18-16-64-bfloat16-channels_last-plain"),
        ("layout", "resnet18-16-64-float32-contiguous-plain"),
        ("layout", "resnet18-16-64-float32-channels_last-end_to_end"),
    )],
    ("classify", "temperature", 1.1),
    ("detect", "confidence_floor", 0.3), ("detect", "nms_iou", 0.5), ("detect", "max_detections", 100),
]  # fmt: skip


@pytest.mark.parametrize(("task", "field", "value"), OTHERS)
def test_whatever_changes_answers_changes_the_digest_and_is_named(task: str, field: str, value: Any):
    spec = a_spec(task)
    other = replace(spec, **{field: value})
    assert other.settings_digest != spec.settings_digest
    (change,) = setting_changes(spec.settings, other.settings)
    assert change.name in (field, "dtype", "memory_format", "head")
    assert change.before != change.after


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        ("classify", {"confidence_floor": 0.3, "nms_iou": 0.5, "max_detections": 1}),
        ("detect", {"temperature": 2.0}),
        ("classify", {"file": Path("moved.safetensors"), "expert": ExpertId("Q"), "sha256": "1" * 64}),
    ],
)
def test_what_changes_no_answer_changes_no_digest(task: str, fields: dict[str, Any]):
    assert a_spec(task, **fields).settings_digest == a_spec(task).settings_digest


@given(size=SIZES, classes=CLASSES, mean=CHANNELS, std=CHANNELS, temperature=st.floats(0.01, 100))
def test_the_text_is_canonical_json_and_gives_the_entry_back(
    size: int, classes: tuple[str, ...], mean: Any, std: Any, temperature: float
):
    spec = a_spec(input_size=size, classes=classes, mean=mean, std=std, temperature=temperature)
    values = json.loads(spec.settings)
    assert json.dumps(values, sort_keys=True, separators=(",", ":")) == spec.settings
    assert spec.settings_digest == digest_of(spec.settings) == hashlib.sha256(spec.settings.encode()).hexdigest()[:12]
    entry = entry_with(spec.settings, "weights.safetensors", spec.sha256)
    assert isinstance(entry, CatalogEntry)
    assert (entry.classes, entry.input_size, entry.temperature) == (classes, size, temperature)
    assert entry.normalisation.model_dump() == {"mean": mean, "std": std}  # type: ignore[union-attr]
    assert entry.sha256 == spec.sha256
