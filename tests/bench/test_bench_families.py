import json

import pytest
from typer.testing import CliRunner

from tools.cli.main import app

pytestmark = pytest.mark.test_all


def test_heads_serve_the_same_images_with_switches_of_detectors_only() -> None:
    done = CliRunner().invoke(app, ["bench", "families", "--images", "32", "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout[done.stdout.index("{") :])
    assert figures["failures"] == []
    assert figures["loads"]["heads"][0] <= 2 < figures["loads"]["networks"][0]
    assert figures["350_heads_bytes"] < 400e6
    assert len(figures["images_per_s"]["heads"]) == 1
