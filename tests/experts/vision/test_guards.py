"""Guards: limits of the pictures that an expert can judge, from those that it learned from."""

import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from pydantic import ValidationError

from experts.catalog import CatalogEntry, entry_with
from experts.spec import PictureLimits
from experts.vision.guards import cannot_be_judged, learn_limits, picture_figures
from experts.vision.infer import infer
from experts.vision.preprocess import Image, fit
from experts.vision.slot import loaded_slot
from tests.experts.samples import an_expert_file

SIZE = 64
LIMITS = PictureLimits(brightness=(20.0, 200.0), sharpness=(1.0, 9.5), constant=0.25, distance=2.5)


def a_part(seed: int, size: int = SIZE) -> Image:
    """Return a bright body on a darker board, both with some texture, under light that varies."""
    rng = np.random.default_rng(seed)
    picture = rng.normal(60, 4, (size, size, 3))
    picture[size // 4 : -size // 4, size // 3 : -size // 3] += 80
    return (picture * rng.uniform(0.8, 1.2)).clip(0, 255).astype(np.uint8)


def is_refused(picture: Image, limits: PictureLimits) -> bool:
    return cannot_be_judged(picture_figures(picture[None])[0], limits)


def striped(picture: Image) -> Image:
    picture = picture.copy()
    picture[len(picture) // 2 :] = np.random.default_rng(0).integers(0, 4, picture[len(picture) // 2 :].shape)
    return picture


@pytest.mark.promise("Containment", "A picture on which nothing can be judged (dark, blurred, cut off) never passes")
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(np.zeros_like, id="black"),
        pytest.param(lambda x: np.full_like(x, 255), id="white"),
        pytest.param(lambda x: x // 8, id="dark"),
        pytest.param(lambda x: (x * 3.0 + 60).clip(0, 255).astype(np.uint8), id="overexposed"),
        pytest.param(lambda x: cv2.GaussianBlur(x, (0, 0), len(x) / 8), id="blurred"),
        pytest.param(lambda x: np.random.default_rng(1).integers(0, 256, x.shape, np.uint8), id="noise"),
        pytest.param(striped, id="lower half cut off"),
        pytest.param(lambda x: striped(x.transpose(1, 0, 2)).transpose(1, 0, 2), id="right half cut off"),
    ],
)
@pytest.mark.parametrize("size", [SIZE, 300])
def test_a_picture_on_which_nothing_can_be_judged_is_outside_the_limits(spoil, size: int):
    limits = learn_limits(a_part(seed, size) for seed in range(6))
    assert is_refused(spoil(a_part(50, size)), limits)
    assert not any(is_refused(a_part(seed, size), limits) for seed in range(40, 46))


def test_one_picture_leaves_wider_limits_than_many():
    one, many = learn_limits([a_part(0)]), learn_limits([a_part(0)] * 50)
    assert one.brightness[1] > many.brightness[1] > picture_figures(a_part(0)[None])[0, 0]


def test_an_answer_about_such_a_picture_carries_the_guard_and_is_the_same_otherwise(tmp_path: Path):
    spec = an_expert_file(tmp_path, "c", "resnet18", 3, input_size=SIZE)
    guarded = replace(spec, pictures=learn_limits(a_part(seed) for seed in range(20)))
    images = [fit(picture, "classify", SIZE) for picture in (a_part(30), striped(a_part(30)))]
    plain, found = (infer(loaded_slot(each), images) for each in (spec, guarded))
    assert [answer.guards for answer in plain] == [(), ()]
    assert [answer.guards for answer in found] == [(), ("picture_quality",)]
    assert [replace(answer, guards=()) for answer in found] == plain


def test_limits_are_settings_of_an_expert_and_come_back_from_them(tmp_path: Path):
    spec = an_expert_file(tmp_path, "c", "resnet18", 3, input_size=SIZE)
    limited = replace(spec, pictures=LIMITS)
    assert "pictures" not in json.loads(spec.settings)
    assert limited.settings_digest != spec.settings_digest
    entry = entry_with(limited.settings, "c.safetensors", spec.sha256)
    assert entry is not None
    assert entry.pictures == LIMITS


@pytest.mark.parametrize(
    "pictures",
    [
        {"brightness": [20, 200], "sharpness": [1, 9], "constant": 0.2, "exposure": 3},
        {"brightness": [20], "sharpness": [1, 9], "constant": 0.2},
        {"brightness": [20, float("nan")], "sharpness": [1, 9], "constant": 0.2},
    ],
)
def test_limits_that_a_person_mistyped_are_refused(pictures: dict[str, object]):
    entry = {"architecture": "resnet18", "file": "c", "input_size": 64, "normalisation": "none", "sha256": "0" * 64}
    with pytest.raises(ValidationError):
        CatalogEntry.model_validate(entry | {"pictures": pictures}, strict=False)
