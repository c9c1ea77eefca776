"""Run in a network namespace that has loopback and nothing else: a whole line works, and the kernel saw no attempt to
reach anything outside.

`unshare --net python -m tests.contract.without_a_network FOLDER` prints what the kernel counted, as JSON.
"""

import http.client
import json
import socket
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from experts.vision import frameworks
from tests.contract.client import Line
from tests.lines import CLASSIFIERS, COSERVE_RUN
from tests.waiting import PATIENCE_S

HTTP_PORT, HTTP_PATHS = 9470, ("/metrics", "/readyz", "/healthz")


def kernel_counts() -> dict[str, int]:
    """Return what the kernel counted here: packets without a route, datagrams (to name servers), connections."""
    rows = [row.split() for row in Path("/proc/net/snmp").read_text().splitlines()]
    table = {(names[0], name): int(value) for names, values in zip(rows[::2], rows[1::2], strict=True)
             for name, value in zip(names[1:], values[1:], strict=True)}  # fmt: skip
    six = dict(row.split() for row in Path("/proc/net/snmp6").read_text().splitlines())
    return {
        "no_route": table["Ip:", "OutNoRoutes"] + int(six.get("Ip6OutNoRoutes", 0)),
        "datagrams": table["Udp:", "OutDatagrams"] + table["Udp:", "NoPorts"] + int(six.get("Udp6OutDatagrams", 0)),
        "connections": table["Tcp:", "ActiveOpens"],
    }


def run_the_line(folder: Path) -> dict[str, Any]:
    line = Line.at(folder / "coserve.yaml", COSERVE_RUN)
    with line.service():
        for component in CLASSIFIERS:
            line.send(board={"type": "open-board", "serial": "S1"}, component=component)
        line.idle()
        line.control("reload")
        for path in HTTP_PATHS:
            with closing(http.client.HTTPConnection("127.0.0.1", HTTP_PORT, timeout=PATIENCE_S)) as connection:
                connection.request("GET", path)
                assert connection.getresponse().status == 200
        return {name: line.status()[name] for name in ("accepted", "completed", "last_error")}


def main(folder: Path) -> None:
    frameworks.torchvision()
    frameworks.ultralytics().YOLO("yolo11n.yaml")
    after_imports = kernel_counts()
    answers = run_the_line(folder)
    after_line = kernel_counts()
    with suppress(OSError), socket.socket() as outward:
        outward.connect(("203.0.113.1", 9))  # that the meter counts at all
    with suppress(OSError):
        socket.getaddrinfo("meter.invalid", 80)
    print(json.dumps({**answers, "imports": after_imports, "line": after_line, "provoked": kernel_counts()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
