"""The examples that come with the product compile, and do what their comments say."""

import re
from pathlib import Path

import pytest

from routing_rules.compile import compile_rules
from routing_rules.load import read_yaml
from tests import ROOT

EXAMPLES = sorted((ROOT / "routing_rules/examples").glob("*.yaml"))
DOCUMENTED = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/rules.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_compiles_without_a_catalog_and_is_commented(path: Path) -> None:
    assert compile_rules(read_yaml(path)).experts
    assert path.read_text(encoding="utf-8").count("#") >= 4


@pytest.mark.parametrize("text", [text for text in DOCUMENTED if text.startswith("boards:")])
def test_whole_rules_in_the_documentation_compile(text: str) -> None:
    assert compile_rules(text).experts
