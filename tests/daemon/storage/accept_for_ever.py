"""A process to be killed: accepts images as fast as it can, says which on stdout, finishes every third."""

import os
import sys
import time
from pathlib import Path

from tests.daemon.storage.database.store_parts import an_arrival, an_outcome
from tests.daemon.storage.test_writer import Running


def accept_for_ever(folder: Path) -> None:
    line = Running(folder)

    def reply(answer):
        os.write(1, f"{answer.image_id}\n".encode())
        if answer.inspection_id % 3 == 0:
            line.writer.finish(an_outcome(answer.inspection_id))

    n = 0
    while True:
        line.writer.write(an_arrival(f"i{n}", serial=f"S{n % 9}", payload=b"%d" % n), reply)
        n += 1
        if n % 100 == 0:
            time.sleep(0.02)


if __name__ == "__main__":
    accept_for_ever(Path(sys.argv[1]))
