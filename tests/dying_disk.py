"""`python -m tests.dying_disk run CONFIG`: `coserve` on a disk that may die, so that a read never returns.

Who opens FILE waits while FILE.dies lies beside it.
"""

import time
from pathlib import Path

from experts.reading import CachedReader
from tools.cli.main import main

#: For `Service(config, log, command=RUN_ON_A_DYING_DISK)`.
RUN_ON_A_DYING_DISK = ("tests.dying_disk", "run")

_open = CachedReader.open


def _open_or_wait(reader: CachedReader, path: Path) -> int:
    while path.with_name(path.name + ".dies").exists():
        time.sleep(0.05)
    return _open(reader, path)


if __name__ == "__main__":
    CachedReader.open = _open_or_wait
    main()
