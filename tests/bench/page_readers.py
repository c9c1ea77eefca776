"""Reads the event streams of many Line pages until its input ends; then prints the number of events and bytes.

A process of its own, at the lowest priority: the browsers of a plant run on other machines.
"""

import http.client
import os
import re
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from urllib.parse import urlencode

_OPEN_S = 60.0
_QUIET_S = 60.0


class Page:
    """One page: fetched as a browser does, then its stream, read in a thread until it is closed."""

    def __init__(self, url: str) -> None:
        with urllib.request.urlopen(f"{url}/", timeout=_QUIET_S) as answer:  # noqa: S310 - our own http
            html = answer.read().decode()
        topics = re.search(r'data-events="([^"]+)"', html)
        assert topics, "the page listens to nothing"
        query = urlencode([("topic", topic) for topic in topics[1].split()])
        self.stream: http.client.HTTPResponse = urllib.request.urlopen(f"{url}/events?{query}", timeout=_QUIET_S)  # noqa: S310
        self.events = 0
        self.bytes = 0
        self.first = threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        with suppress(OSError, http.client.HTTPException, ValueError):
            for line in self.stream:
                self.bytes += len(line)
                if line.startswith(b"event:"):
                    self.events += 1
                    self.first.set()


def wait_for(url: str) -> None:
    """The pages are a process beside the line, and come up after it."""
    until_s = time.monotonic() + _OPEN_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/", timeout=5).close()  # noqa: S310
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)
        else:
            return


def main(url: str, count: int) -> None:
    """Open the pages, say so, read until stdin ends, say what was heard."""
    os.nice(19)
    wait_for(url)
    pages = [Page(url) for _ in range(count)]
    if not all(page.first.wait(_OPEN_S) for page in pages):
        raise SystemExit("a page heard nothing")
    print("listening", flush=True)
    sys.stdin.read()
    print(sum(page.events for page in pages), sum(page.bytes for page in pages), flush=True)
    if any(page.events < 2 for page in pages):
        raise SystemExit("a page heard its first event only")
    os._exit(0)  # open streams would hold the threads


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
