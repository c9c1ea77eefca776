"""A decoder that a TIFF kills, keeps or bloats: a library before Pillow's, for daemons and children of tests."""

import io
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

_SOURCE = r"""
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Pillow opens every TIFF with this. What it does is in POISON: segv, abort, loop or bomb. */
void *TIFFClientOpen(const char *name, const char *mode, ...) {
    const char *action = getenv("POISON");
    if (action && !strcmp(action, "segv")) *(volatile int *)0 = 1;
    if (action && !strcmp(action, "loop")) for (;;) usleep(1000);
    if (action && !strcmp(action, "bomb")) {
        for (;;) {
            size_t size = 256ul << 20;
            char *part = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (part == MAP_FAILED) abort();
        }
    }
    abort();
}
"""


def a_poisonous_library(folder: Path) -> Path:
    """Build the library once per folder; skips the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler, to break a decoder: install gcc or clang")
    library, source = folder / "poison.so", folder / "poison.c"
    if not library.exists():
        source.write_text(_SOURCE, encoding="utf-8")
        subprocess.run([compiler, "-shared", "-fPIC", "-O0", "-o", str(library), str(source)], check=True)
    return library


def poisoned(library: Path, action: str) -> dict[str, str]:
    return {**os.environ, "LD_PRELOAD": str(library), "POISON": action}


def a_tiff(width: int = 80, height: int = 60) -> bytes:
    """Return a TIFF compressed by LZW: uncompressed ones Pillow decodes by itself."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 90)).save(buffer, "TIFF", compression="tiff_lzw")
    return buffer.getvalue()
