"""The alarm of drift: from the catalog and the newest answers, once a minute, and only where it can be said."""

from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra dashboard")

import numpy as np

from daemon.config.settings import load_config
from daemon.dashboard.pages.experts import ExpertOverview
from daemon.dashboard.pages.line import alarms
from daemon.dashboard.site.site import make_site
from experts.catalog import write_catalog
from experts.drift import histogram
from experts.versions import Versions
from tests.daemon.storage.database.store_parts import a_line as a_store
from tests.daemon.storage.database.store_parts import a_stage, an_arrival, an_outcome
from tests.lines import a_line


def a_judged_line(folder: Path, experts: Path, now: tuple[float, float], answers: int = 400) -> Path:
    """A line whose R0402 was sure in training, and answers from the beta distribution `now`."""
    config = a_line(folder, experts)
    random = np.random.default_rng(0)
    versions = Versions(config.parent / "experts" / "catalog.yaml")
    entries = {expert.name: expert.in_force for expert in versions.read().values() if expert.in_force is not None}
    trained = {"ok": histogram(random.beta(30, 1, 500).tolist())}
    entries["R0402"] = entries["R0402"].model_copy(update={"confidences": trained})
    write_catalog(versions.catalog, {name: entry.model_dump(mode="json") for name, entry in entries.items()})
    store = a_store(folder)
    arrivals = [an_arrival(f"i{n}", type="loose", serial="S1", payload=f"i{n}".encode()) for n in range(answers)]
    version = entries["R0402"].sha256[:12]
    outcomes = [
        an_outcome(image.inspection_id, stages=[a_stage("R0402", expert_version=version, confidence=confidence)])
        for image, confidence in zip(store.accept(*arrivals), random.beta(*now, answers).tolist(), strict=True)
    ]
    store.judge(*outcomes)
    store.store.close()
    return config


def test_an_expert_that_sees_other_images_raises_a_notice_with_its_name(tmp_path: Path, experts_folder: Path):
    site = make_site(load_config(a_judged_line(tmp_path / "line", experts_folder, (9.0, 3.0))))
    assert ExpertOverview(site).drifted() == ["R0402"]
    (alarm,) = alarms({"state": "ready", "drifted": ["R0402"]})
    assert alarm.level == "notice"
    assert "R0402 answers with another confidence" in alarm.title
    (two,) = alarms({"state": "ready", "drifted": ["R0402", "C0603"]})
    assert "R0402, C0603 answer with another confidence" in two.title
    site.database.close()


@pytest.mark.parametrize(("now", "answers"), [((30.0, 1.0), 400), ((9.0, 3.0), 20)])
def test_the_same_images_or_too_few_raise_none(tmp_path: Path, experts_folder: Path, now, answers: int):
    site = make_site(load_config(a_judged_line(tmp_path / "line", experts_folder, now, answers)))
    assert ExpertOverview(site).drifted() == []
    site.database.close()
