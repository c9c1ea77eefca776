from pathlib import Path

import torch

from daemon.config.settings import load_config
from tools.demo.line import write_configuration

torch.set_num_threads(1)


def test_the_configuration_loads_and_a_changed_one_is_kept(tmp_path: Path):
    path = write_configuration(tmp_path)
    config = load_config(path)
    assert config.rules == tmp_path / "rules.yaml"
    assert config.catalog == tmp_path / "experts" / "catalog.yaml"
    changed = path.read_text(encoding="utf-8").replace("max_batch: 8", "max_batch: 4")
    path.write_text(changed, encoding="utf-8")
    assert write_configuration(tmp_path).read_text(encoding="utf-8") == changed
