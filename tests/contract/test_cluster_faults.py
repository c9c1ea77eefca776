"""Faults of a device on another PC, in a real Ray cluster: each is told by name, costs what it must, and ends."""

import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from daemon.cluster.messages import SentImage
from daemon.cluster.remote_devices import ClusterDevices, RemotePool
from daemon.config.settings import load_config
from daemon.dispatch.pool import Batch
from daemon.dispatch.torch_devices import TorchDevices
from daemon.host.children import Children
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId
from daemon.records import JournalKey, Pixels
from experts.errors import ExpertError
from experts.spec import Answer, ExpertId, ExpertSpec
from tests import ROOT
from tests.contract.cluster import RAY_S, RayCluster, a_token, short_folder
from tests.contract.test_no_outbound import WITHOUT_A_NETWORK, must_have_namespaces
from tests.experts.samples import an_expert_file
from tests.lines import a_jpeg
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.test_all, pytest.mark.timeout(3600)]

NAME, _BUDGET_BYTES = "pc2-cpu", 100_000_000
_EXECUTOR = ExecutorId(f"{NAME}/0")


class Remote:
    """The daemon's side of one device of another PC: a pool, an executor, and what its drive hears of it."""

    def __init__(self, folder: Path, settings: dict[str, str], host: str = "pc2") -> None:
        folder.mkdir()
        device = {"host": f"{host}/cpu", "expert_memory": _BUDGET_BYTES}
        config = folder / "coserve.yaml"
        lines = {"rules": "r", "catalog": "c", "cluster": settings, "devices": {NAME: device}}
        config.write_text(yaml.safe_dump(lines), encoding="utf-8")
        self.heard: list[str] = []
        self.reports: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        self._is_back = threading.Event()
        self._children = Children()
        self._batches = 0
        self.devices = ClusterDevices(config, load_config(config, {}), TorchDevices({}))
        pool = PoolFacts(PoolId(NAME), "cpu", _BUDGET_BYTES, 8, host=host)
        read: Callable[[JournalKey], bytes] = lambda key: a_jpeg(key.offset, 90, 70)  # noqa: E731
        (self._pool,) = self.devices.pools(
            [pool], [ExecutorFacts(_EXECUTOR, pool.pool)], read, lambda: lambda _key: None, 1 << 24
        )
        assert isinstance(self._pool, RemotePool)
        self.pool = self._pool.slots
        self._pool.start()
        self._children.start(self.devices.children())
        self.devices.start(self)  # pyright: ignore[reportArgumentType]

    def device_lost(self, device: str, reason: str, *, was_there: bool = True) -> None:
        self._is_back.clear()
        self.heard.append(reason)

    def device_back(self, device: str, resume: Callable[[], None]) -> None:
        resume()
        self._is_back.set()

    def is_back(self) -> None:
        until(self._is_back.is_set, lambda: self.heard, RAY_S)

    def hears(self, text: str) -> None:
        until(lambda: any(text in reason for reason in self.heard), lambda: self.heard, RAY_S)

    def submit(self, spec: ExpertSpec, images: int = 4) -> None:
        self._batches += 1
        each = [SentImage(JournalKey(1, n, 1), Pixels()) for n in range(images)]
        self._pool.run(Batch(self._batches, _EXECUTOR, spec, each, [None] * images), self.reports.put)

    def judge(self, spec: ExpertSpec) -> None:
        """Load an expert, and judge a batch with it."""
        self.pool.load(spec)
        self.submit(spec)
        report = self.reports.get(timeout=RAY_S)
        assert report.device_error is None
        assert [type(answer) for answer in report.answers] == [Answer] * 4
        self.pool.unload(spec.expert)

    def end(self) -> None:
        self._pool.stop(5.0)
        self._children.stop()
        self.devices.stop()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[RayCluster]:
    with RayCluster(folder) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def remote(folder: Path, cluster: RayCluster) -> Iterator[Remote]:
    remote = Remote(folder / "line", cluster.settings)
    try:
        remote.is_back()
        yield remote
    finally:
        remote.end()


@pytest.fixture(scope="module")
def spec(folder: Path) -> ExpertSpec:
    return an_expert_file(folder / "weights")


def test_an_expert_whose_bytes_do_not_match_is_refused_by_name_and_mended_by_its_file(
    remote: Remote, cluster: RayCluster, spec: ExpertSpec
):
    whole = spec.file.read_bytes()
    spec.file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ExpertError, match=f"the bytes that arrived are .*, not {spec.sha256[:12]}: restore") as raised:
        remote.pool.load(spec)
    assert raised.value.expert == spec.expert
    assert list(cluster.worker.cache.iterdir()) == []
    spec.file.write_bytes(whole)
    remote.judge(spec)


@pytest.mark.promise("Versions of experts", "A worker without memory names the expert in its answer and goes on")
def test_a_worker_without_memory_answers_by_name_and_goes_on(remote: Remote, cluster: RayCluster, spec: ExpertSpec):
    actor = cluster.worker.actor()
    remote.pool.load(spec)
    _, most = actor.rlimit(psutil.RLIMIT_AS)
    actor.rlimit(psutil.RLIMIT_AS, (actor.memory_info().vms, most))
    more = replace(spec, expert=ExpertId("more"))
    with pytest.raises(ExpertError, match=r"has no \d+ bytes left; lower the device's budget") as raised:
        remote.pool.load(more)
    assert raised.value.expert == "more"
    actor.rlimit(psutil.RLIMIT_AS, (most, most))
    remote.pool.unload(spec.expert)
    remote.judge(spec)
    assert cluster.worker.actor().pid == actor.pid


def test_a_worker_that_stands_still_loses_its_batch_once_and_is_used_again(
    remote: Remote, cluster: RayCluster, spec: ExpertSpec
):
    actor = cluster.worker.actor()
    remote.pool.load(spec)
    actor.suspend()
    remote.submit(spec)
    report = remote.reports.get(timeout=RAY_S)
    assert report.is_lost
    assert "its worker on pc2 has not answered for 15 s" in str(report.device_error)
    with suppress(psutil.NoSuchProcess):  # Ray may have ended it
        actor.resume()
    remote.is_back()
    assert remote.reports.empty()
    remote.judge(spec)
    assert cluster.worker.actor().pid != actor.pid


@pytest.mark.promise(
    "Versions of experts",
    "A worker with other code, a line or worker with another secret, and weights whose bytes do not have their "
    "sha256 are refused; the message names them",
)
def test_a_worker_with_other_code_is_refused_by_name(folder: Path, cluster: RayCluster):
    code = folder / "code"
    for name in ("daemon", "experts", "routing_rules", "tools", "coserve_client"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (code / "daemon" / "units.py").open("a") as file:
        file.write("# another version\n")
    node = cluster.another("pc3", code=code)
    node.start()
    remote = Remote(folder / "line3", cluster.settings, host="pc3")
    try:
        remote.hears("install the same version on both")
    finally:
        remote.end()
        node.kill()


def test_whoever_has_another_token_stays_outside(folder: Path, cluster: RayCluster):
    wrong = a_token(folder / "wrong")
    node = cluster.another("pc4", token=wrong)
    process = node.start_once()
    remote = Remote(folder / "line4", cluster.settings | {"token": str(wrong)})
    try:
        remote.hears(f"the cluster at {cluster.address} cannot be joined: ")
        assert remote.heard[-1].endswith(": compare cluster.token with the head's")
        assert process.wait(PATIENCE_S) != 0
    finally:
        remote.end()
        node.kill()
    refused = f"the cluster at {cluster.address} cannot be joined: it has another token: copy its file to this PC"
    assert " ".join(node.log.read_text().split()).endswith(f"coserve: {refused}, and name the copy with --token")


@pytest.mark.promise(
    "Versions of experts",
    "If the cable to another PC is cut, every image still gets exactly one verdict; the PC is used again when "
    "the cable is mended",
)
def test_a_cable_that_is_cut_costs_no_image_and_is_used_again_when_it_is_mended(torch_experts_folder: Path):
    must_have_namespaces()
    with short_folder() as folder:
        module = [sys.executable, "-m", "tests.contract.cut_cable", str(folder), str(torch_experts_folder)]
        done = subprocess.run([*WITHOUT_A_NETWORK, *module], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
