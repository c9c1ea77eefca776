import subprocess
import sys

import numpy as np
import pytest

from experts.vision.architectures import ARCHITECTURES, layout_id
from experts.vision.frameworks import greedy_nms
from experts.vision.layouts import build_layout


def test_empty_boxes_and_equal_scores_keep_their_order():
    boxes = np.array([[5, 5, 5, 5], [5, 5, 5, 5], [0, 0, 10, 10], [0, 0, 10, 10]], dtype=np.float32)
    assert greedy_nms(boxes, np.ones(4, dtype=np.float32), 0.5).tolist() == [0, 1, 2]


def test_importing_changes_nothing_in_the_process_and_opens_no_connection():
    code = """
import os, sys, cv2, numpy as np, torch
from PIL import Image
torch.set_num_threads(2); cv2.setNumThreads(2); os.environ.pop("OMP_NUM_THREADS", None)
before = np.get_printoptions(), Image.open
reached = []
sys.addaudithook(lambda event, args: reached.append(args) if event.startswith("socket.") else None)
from experts.vision.frameworks import ultralytics
ultralytics()
from ultralytics.utils import ONLINE, SETTINGS
from ultralytics.utils.checks import check_font
from ultralytics.utils.events import Events
assert not ONLINE and not SETTINGS["sync"] and not Events().enabled
assert (torch.get_num_threads(), cv2.getNumThreads()) == (2, 2)
assert "OMP_NUM_THREADS" not in os.environ and "NUMEXPR_MAX_THREADS" not in os.environ
assert (np.get_printoptions(), Image.open) == before
check_font("NoSuchFontAnywhere.ttf")
try:
    from ultralytics.nn.tasks import torch_safe_load
    torch_safe_load("yolo11n.pt")
    raise SystemExit("it loaded weights that are not there")
except FileNotFoundError:
    pass
assert reached == [], reached
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stdout) == (0, ""), finished.stderr


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if not name.endswith(("l", "x"))])
def test_every_architecture_builds_a_layout(name: str):
    layout = build_layout(layout_id(ARCHITECTURES[name], 3, 64, "bfloat16", "channels_last"))
    assert layout.region_bytes % 4096 == 0
    assert all(parameter.is_meta for parameter in layout.shell.parameters())
    assert not layout.end_to_end
