import cv2
import numpy as np
import pytest

from tools.camera.render import RenderedBoard, board_types, part_types, render_board, render_unit, training_panel
from tools.camera.render.parts import PLACEMENT_DEFECTS, SOLDER_DEFECTS

PARTS = list(part_types())
#: What a part with a solder defect must show; the other marks are good joints.
SOLDER_LABELS = ("joint", *SOLDER_DEFECTS)
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


def overlap(box: tuple[float, ...], second: tuple[float, ...]) -> bool:
    return box[0] < second[2] and second[0] < box[2] and box[1] < second[3] and second[1] < box[3]


def test_the_library_has_16_types_in_7_families_and_every_defect_occurs() -> None:
    library = part_types()
    assert len(library) == 16
    assert len({part.family for part in library.values()}) == 7
    assert {kind for part in library.values() for kind in part.defects} == {*PLACEMENT_DEFECTS, *SOLDER_DEFECTS}
    for part in library.values():
        assert part.labels == ("ok", *(kind for kind in part.defects if kind in part.labels[1:])), part.name
        assert set(part.labels[1:]) <= set(PLACEMENT_DEFECTS)


def test_four_products_carry_all_types_and_no_part_lies_on_another() -> None:
    boards = board_types()
    assert len(boards) == 4
    assert {place.component for board in boards.values() for place in board.places} == set(PARTS)
    for board in boards.values():
        assert len({place.designator for place in board.places}) == len(board.places)
        assert sum(len(names) for names in board.designators().values()) == len(board.places)
        boxes = []
        for place in board.places:
            part = part_types()[place.component]
            x, y = part.length / 2, part.width / 2
            x, y = (y, x) if place.quarter_turns % 2 else (x, y)
            box = (place.x - x, place.y - y, place.x + x, place.y + y)
            assert [name for name, placed in boxes if overlap(box, placed)] == [], f"{board.name} {place.designator}"
            boxes.append((place.designator, box))


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


def test_the_defect_rate_is_the_share_of_bad_parts() -> None:
    assert {p.truth for p in render_board("sensor-node", 1, 0.0).placements} == {"ok"}
    assert "ok" not in {p.truth for p in render_board("sensor-node", 1, 1.0).placements}


def test_an_unknown_board_type_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="toaster"):
        render_board("toaster", 1, 0.1)


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


@pytest.mark.parametrize("component", PARTS)
def test_marks_lie_inside_the_crop_and_say_what_the_solder_is(component: str) -> None:
    part = part_types()[component]
    kinds = ["ok", *part.defects]
    for placement in a_panel(component, kinds).placements:
        labels = [mark.label for mark in placement.marks]
        assert set(labels) <= set(SOLDER_LABELS)
        for mark in placement.marks:
            x1, y1, x2, y2 = mark.box
            assert 0 <= x1 < x2 <= part.crop_px, f"{placement.truth} {mark}"
            assert 0 <= y1 < y2 <= part.crop_px, f"{placement.truth} {mark}"
        if placement.truth == "ok":
            assert labels == ["joint"] * len(part.pads)
        elif placement.truth in SOLDER_DEFECTS:
            assert placement.truth in labels
        else:
            assert labels == [], f"{placement.truth}: solder under a part that is not in its place is not judged"


@pytest.mark.parametrize("component", [name for name, part in part_types().items() if "bridge" in part.defects])
def test_solder_bridges_cover_two_pads(component: str) -> None:
    for placement in a_panel(component, ["bridge"] * 6).placements:
        joints = [mark.box for mark in placement.marks if mark.label == "joint"]
        bridges = [mark.box for mark in placement.marks if mark.label == "bridge"]
        assert bridges
        for bridge in bridges:
            assert sum(overlap(bridge, joint) for joint in joints) == 2, f"{component}: {bridge}"


@pytest.mark.parametrize("product", ["display-driver", "power-supply"])
def test_on_board_maps_boxes_of_a_crop_to_the_pixels_they_were_cut_from(product: str) -> None:
    board = render_board(product, 2, 0.0)
    for placement in board.placements:
        side = placement.pixels.shape[0]
        box = (side // 8, side // 4, side // 2, side - 5)
        x1, y1, x2, y2 = placement.on_board(box)
        on_board = board.image[int(y1) : int(y2), int(x1) : int(x2)]
        in_crop = placement.pixels[box[1] : box[3], box[0] : box[2]]
        assert np.array_equal(np.rot90(in_crop, placement.quarter_turns), on_board)
    turns = {"display-driver": {0, 1, 3}, "power-supply": {0, 1, 2}}
    assert {placement.quarter_turns for placement in board.placements} == turns[product]


def test_panels_have_looks_of_their_own() -> None:
    first, different = training_panel(["R0402", "QFP44"], 1), training_panel(["R0402", "QFP44"], 2)
    assert (first.mask, first.design_seed) != (different.mask, different.design_seed)
    assert first.mask not in {board.mask for board in board_types().values()}
    assert [place.designator for place in first.places] == ["R1", "U2"]
