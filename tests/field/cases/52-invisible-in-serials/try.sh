#!/bin/bash
# A serial copied from a web page: a zero-width space and a mark that turns the writing round.
cd "$(dirname "$0")"; COSERVE=${COSERVE:-coserve}; PYTHON=${PYTHON:-python3}; LINE=${LINE:-line/coserve.yaml}; OUT=$(mktemp -d)
$PYTHON - $OUT <<'P'
import sys
from pathlib import Path
import numpy as np
out = Path(sys.argv[1])
import cv2
video = cv2.VideoWriter(f"{out}/belt.avi", cv2.VideoWriter_fourcc(*"MJPG"), 10, (64, 64))
for number in range(3):
    video.write(np.random.default_rng(number).integers(0, 255, (64, 64, 3), np.uint8))
video.release()
(out / "layout.yaml").write_text("board: psu\nsize: [64, 64]\nparts:\n  R1: {component: R0603, box: [0, 0, 64, 64]}\n")
(out / "serials.txt").write_text("HID-1\nHID\u200b-2\nHID-\u202e3\n", encoding="utf-8")
P
$COSERVE camera $LINE --video $OUT/belt.avi --every 1 --state $OUT/state --layout $OUT/layout.yaml --serials-from $OUT/serials.txt --source case52 2>&1 | sed "s#$OUT#OUT#g"; echo "exit ${PIPESTATUS[0]}"
$COSERVE results --config $LINE --json | $PYTHON -c "
import json,sys; rows=json.load(sys.stdin); rows=rows.get('inspections', rows) if isinstance(rows, dict) else rows
print('serials:', sorted({ascii(r['serial']) for r in rows if 'HID' in str(r['serial'])}))"
