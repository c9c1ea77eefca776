"""The drive when a device fails, and where each executor has its own share of a device, on simulated devices."""

from collections.abc import Callable, Container, Sequence

import pytest

from daemon.dispatch.pool import Batch
from daemon.policy.request import PoolId
from daemon.wire.control import ControlError
from tests.daemon.dispatch.simulated_line import Line, a_catalog, a_line, a_mix, an_image

LOST = "AcceleratorError: CUDA error: device-side assert triggered"


def lose(line: Line, pool: str, batches: Container[int] = range(1 << 30)) -> list[Batch]:
    """Let these of the next batches of a pool, counted from 0, end with an error of its device; return all."""
    ended: list[Batch] = []

    def on_end(batch: Batch) -> None:
        ended.append(batch)
        if len(ended) - 1 in batches:
            batch.fail(LOST)
            batch.device_error = LOST

    meddle(line, pool, on_end)
    return ended


def meddle(line: Line, pool: str, on_end: Callable[[Batch], None]) -> None:
    """Call `on_end` before the drive learns of the end of a batch of this pool."""
    device = line.pools[PoolId(pool)]
    device.run = lambda batch, done: type(device).run(device, batch, lambda ended: (on_end(ended), done(ended)))


@pytest.mark.promise("Containment", "A lost device costs a few batches; the other devices continue")
@pytest.mark.parametrize("policy", ["samba-parallel", "coserve", "coserve-plus"])
def test_a_device_that_disappears_costs_a_few_batches_and_the_others_serve_the_rest(policy: str):
    line = a_line(policy=policy, budgets={"cuda:0": 60, "cpu": 60}, executors=["cuda:0", "cpu"])
    lose(line, "cuda:0")
    line.accept(*a_mix(80))
    line.run()
    assert len(line.outcomes) == 80
    # Each image of a batch that the device lost is tried once more, which the same device may lose again.
    assert sum(reason == "expert_failed" for reason in line.reasons().values()) <= 4
    assert line.drive.is_failing
    status = line.ask("status")
    rows = {row["name"]: row for row in status["executors"]}
    assert "device-side assert" in rows["cuda:0/0"]["out_of_service"]
    assert "out_of_service" not in rows["cpu/1"]
    assert "cuda:0/0" in status["last_error"]
    assert (rows["cuda:0/0"]["resident"], rows["cuda:0/0"]["budget_bytes"]) == ([], 0)
    with pytest.raises(ControlError, match="restart the daemon"):
        line.ask("limits", expert_memory={"cuda:0": 60})


def test_the_only_device_is_tried_again_after_a_while():
    line = a_line(budgets={"cuda:0": 60}, executors=["cuda:0"])
    lose(line, "cuda:0", batches=range(3))
    line.accept(*(an_image(n, "B") for n in range(40)))
    line.run(until_s=20.0)
    assert line.outcomes == {}
    assert line.drive.is_failing
    with pytest.raises(ControlError, match="retried automatically"):
        line.ask("limits", expert_memory={"cuda:0": 50})
    line.run()
    assert list(line.reasons().values()) == [None] * 40
    assert not line.drive.is_failing


def test_an_image_whose_second_batch_the_device_loses_too_ends_and_no_image_waits_for_ever():
    line = a_line(budgets={"cuda:0": 60}, executors=["cuda:0"])
    lose(line, "cuda:0")
    line.accept(*(an_image(n, "B") for n in range(8)))
    line.run(until_s=20.0)
    assert list(line.reasons().values()) == ["expert_failed"] * 4
    assert "cuda:0/0" in line.ask("status")["last_error"]
    line.run()
    assert list(line.reasons().values()) == ["expert_failed"] * 8


def test_one_error_is_an_accident():
    line = a_line(budgets={"cuda:0": 60, "cpu": 60}, executors=["cuda:0", "cpu"])
    lose(line, "cuda:0", batches=range(2))
    line.accept(*(an_image(n, "B") for n in range(40)))
    line.run()
    assert not line.drive.is_failing
    assert "out_of_service" not in line.ask("status")["executors"][0]


def own_pools(budgets: dict[str, int] | None = None, executors: Sequence[str] = ("cpu", "cpu")) -> Line:
    line = a_line(policy="coserve", budgets=budgets or {"cpu": 60}, executors=executors)
    line.run()
    return line


def test_limits_that_one_pool_refuses_change_no_pool():
    line = own_pools({"cpu": 60, "cuda:0": 60}, ["cpu", "cpu", "cuda:0"])
    with pytest.raises(ControlError) as caught:
        line.ask("limits", expert_memory={"cuda:0": 5, "cpu": 18})
    assert caught.value.code == "does_not_fit"
    assert line.ask("limits") == {"expert_memory": {"cpu": 60, "cuda:0": 60}}


def test_a_pin_on_a_device_takes_the_pool_that_has_the_expert():
    line = own_pools()
    (home,) = [pool for pool, fake in line.pools.items() if "C" in fake.memory.resident()]
    assert line.ask("pin", expert="C", device="cpu") == {"expert": "C", "device": "cpu"}
    (row,) = [row for row in line.ask("experts")["experts"] if row["expert"] == "C"]
    assert row["pinned"] == [home]
    with pytest.raises(ControlError) as caught:
        line.ask("unload", expert="C", device="cpu")
    assert caught.value.code == "pinned"
    assert line.ask("unpin", expert="C", device="cpu") == {"expert": "C"}
    with pytest.raises(ControlError, match="not pinned on cpu"):
        line.ask("unpin", expert="C", device="cpu")


@pytest.mark.promise(
    "Versions of experts",
    "If a device of another PC is lost (its process, its Ray, or the head killed), every image still gets "
    "exactly one verdict; the device is used again when it is back, empty",
)
@pytest.mark.parametrize("policy", ["samba-parallel", "coserve", "coserve-plus"])
def test_a_device_that_is_lost_and_comes_back_costs_no_image_and_is_used_again_from_empty_on(policy: str):
    line = a_line(policy=policy, budgets={"cuda:0": 60, "cpu": 60}, executors=["cuda:0", "cpu"])
    used: list[Batch] = []

    def on_end(batch: Batch) -> None:
        used.append(batch)
        if len(used) == 3:
            batch.fail(LOST)
            batch.device_error, batch.is_lost = LOST, True
            line.drive.device_lost("cuda:0", "the cable is cut")

    meddle(line, "cuda:0", on_end)
    line.accept(*a_mix(80))
    line.run()
    assert list(line.reasons().values()) == [None] * 80
    assert len(used) == 3
    (row,) = (row for row in line.ask("status")["executors"] if row["device"] == "cuda:0")
    assert (row["out_of_service"], row["resident"], row["budget_bytes"]) == ("the cable is cut", [], 0)
    assert line.drive.is_failing
    line.drive.device_lost("cuda:0", "it is still cut")
    resumed: list[str] = []
    line.drive.device_back("cuda:0", lambda: resumed.append("before any order"))
    line.turn()
    line.accept(*a_mix(80, first=80))
    line.run()
    assert resumed
    assert list(line.reasons().values()) == [None] * 160
    assert len(used) > 3
    assert not line.drive.is_failing
    (row,) = (row for row in line.ask("status")["executors"] if row["device"] == "cuda:0")
    assert "out_of_service" not in row
    assert (bool(row["resident"]), row["budget_bytes"]) == (True, 60)


def test_experts_that_fit_only_a_lost_device_give_unknown_images_until_it_is_back():
    line = a_line(budgets={"cuda:0": 60, "cpu": 5}, executors=["cuda:0", "cpu"])
    line.drive.device_lost("cuda:0", "the cable is cut")
    lose(line, "cuda:0")
    for name, pool in line.pools.items():
        pool.memory.broken = dict.fromkeys(a_catalog(), LOST) if name == "cuda:0" else {}
    line.accept(*a_mix(8))
    line.run(until_s=10.0)
    assert list(line.reasons().values()) == ["expert_failed"] * 8
    line.pools[PoolId("cuda:0")].memory.broken = {}
    meddle(line, "cuda:0", lambda _batch: None)
    line.drive.device_back("cuda:0", lambda: None)
    line.accept(*a_mix(8, first=8))
    line.run()
    assert [line.reasons()[number] for number in range(8, 16)] == [None] * 8


def test_batches_that_hang_on_another_pc_are_judged_here_and_cost_no_expert():
    line = a_line(budgets={"pc2": 60, "cpu": 60}, executors=["pc2", "pc2", "cpu"], catalog=a_catalog("B"))
    pc2 = line.pools[PoolId("pc2")]
    pc2.hangs = lambda _batch: (1000.0, None)
    pc2.abandon_batch = lambda _batch: line.drive.device_lost("pc2", "a batch did not end in time")
    line.accept(*[an_image(number) for number in range(40)])
    line.run(until_s=300.0)
    assert list(line.reasons().values()) == [None] * 40
    assert line.ask("status")["failed"] == {}
    line.drive.device_back("pc2", lambda: None)
    line.accept(*[an_image(number) for number in range(40, 60)])
    line.run(until_s=600.0)
    assert list(line.reasons().values()) == [None] * 60
