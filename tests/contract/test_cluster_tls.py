"""A cluster whose connections are encrypted: a line judges on another PC, and only its authority's PCs come in."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.certificates import Authority
from tests.contract.client import Line
from tests.contract.cluster import THERE, RayCluster, judged_there, until_used
from tests.lines import COSERVE_RUN, a_jpeg
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.test_all, pytest.mark.timeout(3600)]


def addresses() -> list[str]:
    """Return the addresses that Ray's processes on this PC use: its certificates must name them."""
    from ray.util import get_node_ip_address

    return ["127.0.0.1", get_node_ip_address()]


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ct", dir="/tmp"))  # Ray's sockets need a short path
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_a_line_judges_over_tls_and_a_pc_of_another_authority_stays_outside(
    tmp_path: Path, folder: Path, torch_experts_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in Authority(folder / "plant").environment("pc", *addresses()).items():
        monkeypatch.setenv(name, value)
    cluster = RayCluster(folder)
    stranger = cluster.another("pc3", environ=Authority(folder / "other").environment("pc3", *addresses()))
    line = Line(tmp_path, torch_experts_folder, command=COSERVE_RUN, devices=THERE, cluster=cluster.settings)
    try:
        cluster.start()
        with line.service():
            until_used(line)
            line.send(a_jpeg(1), component="P")
            line.idle()
            assert judged_there(line) > 0
        assert stranger.start_once().wait(PATIENCE_S) == 1
        refused = f"the cluster at {cluster.address} cannot be joined: its head does not answer; if that uses TLS, give"
        said = " ".join(stranger.log.read_text().split())
        assert said == f"coserve: {refused} this PC a certificate of the same authority"
    finally:
        stranger.kill()
        cluster.end()
