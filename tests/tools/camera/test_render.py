import cv2
import numpy as np
import pytest

from tools.camera.render import RenderedBoard, board_types, part_types, render_board, render_unit, training_panel

PARTS = list(part_types())
PANEL_SEED = 3


def a_panel(component: str, kinds: list[str], seed: int = PANEL_SEED) -> RenderedBoard:
    """A small board that carries one component type, each part in a given state."""
    return render_unit(training_panel([component] * len(kinds), seed), kinds, np.random.default_rng(seed))


def contrasts(board: RenderedBoard, number: int, component: str) -> np.ndarray:
    """Return the place of a part on its panel: edges softened, exposure taken out."""
    place = training_panel([component] * len(board.placements), PANEL_SEED).places[number]
    reach = part_types()[component].crop_px // 2
    window = board.image[place.y - reach : place.y + reach, place.x - reach : place.x + reach]
    soft = cv2.GaussianBlur(window.astype(np.float32), (0, 0), 1.5)
    return soft / soft.mean((0, 1))


@pytest.mark.parametrize("kind", sorted(board_types()))
def test_a_board_is_rendered_with_the_truth_about_each_of_its_parts(kind: str) -> None:
    board, product = render_board(kind, 5, 0.3), board_types()[kind]
    assert board.board_type == kind
    assert board.image.shape == (product.height, product.width, 3)
    assert board.image.dtype == np.uint8
    assert board.image.std() > 10
    assert [p.designator for p in board.placements] == [place.designator for place in product.places]
    for placement in board.placements:
        part = part_types()[placement.component]
        assert placement.truth in ("ok", *part.defects)
        assert placement.pixels.shape == (part.crop_px, part.crop_px, 3)
        x1, y1, x2, y2 = placement.box
        on_board = board.image[y1:y2, x1:x2]
        assert np.array_equal(np.rot90(placement.pixels, placement.quarter_turns), on_board)
    assert {p.truth == "ok" for p in board.placements} == {True, False}


def test_the_same_seed_gives_the_same_board_and_another_seed_another() -> None:
    first, same, different = (render_board("sensor-node", seed, 0.2) for seed in (3, 3, 4))
    assert np.array_equal(first.image, same.image)
    assert [p.truth for p in first.placements] == [p.truth for p in same.placements]
    assert [p.marks for p in first.placements] == [p.marks for p in same.placements]
    assert not np.array_equal(first.image, different.image)
    assert [p.truth for p in first.placements] != [p.truth for p in different.placements]


@pytest.mark.parametrize("component", PARTS)
def test_every_defect_of_a_type_looks_different_from_a_good_part(component: str) -> None:
    kinds = ["ok", *part_types()[component].defects]
    good, bad = a_panel(component, ["ok"] * len(kinds)), a_panel(component, kinds)
    assert [p.truth for p in bad.placements] == kinds
    differences = [
        float(np.abs(contrasts(good, number, component) - contrasts(bad, number, component)).max())
        for number in range(len(kinds))
    ]
    # The first part is good on both panels and drawn from the same numbers: what differs there is the photograph.
    for kind, difference in zip(kinds[1:], differences[1:], strict=True):
        assert difference > 2 * differences[0], f"{component} {kind}: {differences}"
