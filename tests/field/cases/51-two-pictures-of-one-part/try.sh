#!/bin/bash
# Two files of one part, as a camera's software and a person leave them: neither may be chosen, the other parts are sent.
COSERVE=${COSERVE:-coserve}; PYTHON=${PYTHON:-python3}; LINE=${LINE:-line/coserve.yaml}; OUT=$(mktemp -d)
$PYTHON - $OUT <<'P'
import sys, time
from pathlib import Path
import numpy as np
from PIL import Image
folder = Path(sys.argv[1]) / "psu" / f"TWICE-{time.time():.0f}"
folder.mkdir(parents=True)
for number, name in enumerate(("R1.R0603.png", "R2.R0603.png", "C1.C0603.png", "C1.C0603.jpg", "C2.C0603.png", "C2.C0805.png")):
    Image.fromarray(np.random.default_rng(number).integers(0, 255, (64, 64, 3), np.uint8)).save(folder / name)
P
$COSERVE camera $LINE $OUT --source case51; echo "exit $?"
