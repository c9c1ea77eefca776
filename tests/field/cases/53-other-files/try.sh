#!/bin/bash
# Files that are no weights of torch, under the names that people give them.
COSERVE=${COSERVE:-coserve}; PYTHON=${PYTHON:-python3}; OUT=$(mktemp -d); export OMP_NUM_THREADS=1
$PYTHON - $OUT <<'P'
import sys, torch
from pathlib import Path
out = Path(sys.argv[1])
net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
torch.jit.trace(net, torch.zeros(1, 3, 8, 8)).save(out / "script.pt")
(out / "lfs.pth").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 46830571\n")
(out / "page.pth").write_text("<!DOCTYPE html><html><body>Sign in</body></html>")
(out / "keras.pth").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))
torch.save({"state_dict": {f"resnet.{k}": v for k, v in net.state_dict().items()}}, out / "other.pth")
P
NORM=$($COSERVE import --help 2>&1 | grep -q -- --normalize && echo '--normalize none')
for f in script.pt lfs.pth page.pth keras.pth other.pth; do echo "== $f"; $COSERVE import $OUT/$f --architecture resnet18 --classes ok,bad --input-size 64 $NORM --out $OUT/e 2>&1 | sed "s#$OUT#OUT#g"; echo "exit ${PIPESTATUS[0]}"; done
