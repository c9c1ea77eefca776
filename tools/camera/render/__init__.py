"""Renders populated boards: seeded, with real defect kinds, and the truth about every part."""

from tools.camera.render.board import PartPlacement, RenderedBoard, render_board, render_unit
from tools.camera.render.layouts import BoardType, board_types, training_panel
from tools.camera.render.parts import PartType, part_types
from tools.camera.render.solder import SolderMark

__all__ = [
    "BoardType",
    "PartPlacement",
    "PartType",
    "RenderedBoard",
    "SolderMark",
    "board_types",
    "part_types",
    "render_board",
    "render_unit",
    "training_panel",
]
