"""A line whose devices are on another PC: the same verdicts, and none lost, twice or unjudged whatever is killed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.line.line import load_line
from tests.contract.client import Line, everything_is_whole, sha256
from tests.contract.cluster import (
    RAY_S,
    THERE,
    TOO_SMALL,
    RayCluster,
    each_was_judged_once,
    images_for_two,
    judged_there,
    short_folder,
    times_lost,
    until_used,
)
from tests.lines import COSERVE_RUN, RULES_OF_VERSIONS, a_jpeg
from tests.lines import a_line as a_line_on_disk
from tests.ports import free_port
from tests.tools.run_commands import coserve
from tests.waiting import until
from tools.experts.change import put, switch
from tools.experts.line import open_line

pytestmark = [pytest.mark.test_all, pytest.mark.timeout(3600)]

HERE = {"cpu": {"expert_memory": "150MB"}}
IMAGES = 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with short_folder() as folder, RayCluster(folder) as cluster:
        yield cluster


def a_line(folder: Path, experts: Path, devices: dict[str, Any], **settings: Any) -> Line:
    return Line(folder, experts, command=COSERVE_RUN, devices=devices, **settings)


def answers(line: Line) -> list[tuple[Any, ...]]:
    return line.rows(
        "SELECT i.image_id, i.verdict, i.defect, s.expert, s.expert_version, s.label, round(s.confidence, 5),"
        " (SELECT json_group_array(json_array(label, round(x1, 2), round(y1, 2), round(x2, 2), round(y2, 2)))"
        " FROM detections d WHERE d.inspection_id = s.inspection_id AND d.step = s.step)"
        " FROM inspections i JOIN stages s ON s.inspection_id = i.inspection_id ORDER BY i.image_id, s.step"
    )


def judge(line: Line) -> list[tuple[Any, ...]]:
    for number in range(IMAGES):
        line.send(a_jpeg(number), component="PVF"[number % 3])
    line.idle()
    return answers(line)


def test_another_pc_gives_the_same_verdicts_and_keeps_what_it_was_sent(
    tmp_path: Path, torch_experts_folder: Path, cluster: RayCluster
):
    local = a_line(tmp_path / "local", torch_experts_folder, HERE)
    with local.service():
        expected = judge(local)
    remote = a_line(tmp_path / "remote", torch_experts_folder, THERE, cluster=cluster.settings)
    with remote.service():
        until_used(remote)
        assert judge(remote) == expected
        remote.wait(lambda: remote.status()["state"] == "ready", RAY_S)
        assert {device for (device,) in remote.rows("SELECT DISTINCT device FROM stages")} == {"pc2-cpu"}
    everything_is_whole(remote)
    assert len(list(cluster.worker.cache.iterdir())) == 4


def test_another_pc_is_profiled_with_its_network_and_the_line_reads_its_rows(
    tmp_path: Path, torch_experts_folder: Path, cluster: RayCluster
):
    there = {"pc2-cpu": THERE["pc2-cpu"] | {"profile": "profile.yaml", "executors": 2}}
    config = a_line_on_disk(tmp_path / "line", torch_experts_folder, devices=HERE | there, cluster=cluster.settings)
    figures = json.loads(coserve("profile", config, "--quick", "--max-batch", "2", "--json").stdout)
    assert figures["skipped"] == {}
    line = load_line(config)
    layouts = {spec.layout for spec in line.catalog.values()}
    rows = {row.architecture: row for row in line.measured.matrix if row.device == "pc2-cpu"}
    assert rows.keys() == layouts == figures["devices"]["pc2-cpu"]["architectures"].keys()
    for layout, entry in figures["devices"]["pc2-cpu"]["architectures"].items():
        assert [*entry["latencies_s"]] == ["1", "2"]
        assert (rows[layout].k_s, rows[layout].disk_s, rows[layout].ram_s) == (entry["k_s"], entry["disk_s"], None)
        assert rows[layout].activation_bytes == figures["devices"]["cpu"]["architectures"][layout]["activation_bytes"]
    assert line.config.devices["pc2-cpu"].executors == figures["devices"]["pc2-cpu"]["executors"] == 2
    assert {file.name for file in cluster.worker.cache.iterdir()} <= {spec.sha256 for spec in line.catalog.values()}
    assert not line.warnings


def test_whatever_is_killed_every_image_has_one_verdict_and_the_worker_is_used_again(
    tmp_path: Path, torch_experts_folder: Path, cluster: RayCluster
):
    line = a_line(tmp_path / "line", torch_experts_folder, TOO_SMALL | THERE, cluster=cluster.settings)
    with line.service():
        until_used(line)
        with line.camera(images_for_two(line)) as account:
            for kill in (cluster.worker.kill_actor, cluster.worker.kill, cluster.head.kill):
                judged_there(line, more_than=judged_there(line))
                lost = times_lost(line)
                kill()
                line.wait(lambda lost=lost: times_lost(line) > lost, RAY_S)
                before = len(answers(line))
                line.wait(lambda before=before: len(answers(line)) > before + 5)
                if kill == cluster.head.kill:
                    cluster.worker.kill()
                    cluster.start()
                elif kill == cluster.worker.kill:
                    cluster.worker.start()
                until_used(line)
            judged_there(line, more_than=judged_there(line))
        line.idle()
        line.wait(lambda: line.status()["state"] == "ready", RAY_S)
    each_was_judged_once(line, account.sent)


@pytest.mark.promise("Versions of experts", "A new version is at the PCs that keep the old one before it is in force")
def test_a_promoted_version_is_at_the_other_pc_before_an_image_needs_it(
    tmp_path: Path, version_folders: tuple[Path, Path], cluster: RayCluster
):
    line = Line(tmp_path, version_folders[0], RULES_OF_VERSIONS, COSERVE_RUN, devices=THERE, cluster=cluster.settings)
    sent = cluster.worker.cache / sha256((version_folders[1] / "P.safetensors").read_bytes())
    with line.service():
        until_used(line)
        line.send(component="P")
        line.idle()
        experts = open_line(line.config)
        new = put(experts, "P", version_folders[1])
        assert not sent.exists()
        assert switch(experts, "P", new)["version"] == new
        until(sent.exists)  # no image has asked for it
        cluster.worker.stop()
        line.wait(lambda: times_lost(line) > 0, RAY_S)
    # Ray would wait for batches that the line gives to others anyway.
    assert "draining before shutdown" not in cluster.worker.log.read_text()


@pytest.mark.promise(
    "Versions of experts",
    "A line whose cluster is out of reach starts and judges with its own devices",
)
def test_a_line_starts_and_judges_without_its_cluster(tmp_path: Path, torch_experts_folder: Path):
    address = f"127.0.0.1:{free_port()}"
    line = a_line(tmp_path / "line", torch_experts_folder, HERE | THERE, cluster={"address": address})
    with line.service():
        assert len(judge(line)) > IMAGES
        line.wait(lambda: line.status()["state"] == "degraded")
        line.wait(lambda: f"no cluster answers at {address}" in (line.status()["last_error"] or ""))
        (row,) = (row for row in line.status()["executors"] if row["device"] == "pc2-cpu")
        assert f"no cluster answers at {address}" in row["out_of_service"]
    everything_is_whole(line)
    assert line.rows("SELECT count(*) FROM inspections WHERE verdict = 'unknown'") == [(0,)]
