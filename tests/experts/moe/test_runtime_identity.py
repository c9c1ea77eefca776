"""The runtime gives what the unmodified model gives, to the bit, however few experts are in memory."""

import pytest
import torch
from tiny import FAMILIES, load_unmodified, prompts, write_tiny

from experts.moe.modes import open_mode
from experts.moe.runtime import MoeRuntime


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {family: write_tiny(root / family, family) for family in FAMILIES}


def open_runtime(folder, slots=None, **options):
    """On demand, with this many slots for each layer (None: for all experts)."""
    from experts.moe.arch import load_config, read_arch

    arch = read_arch(folder, load_config(folder), torch.float32)
    budget_bytes = (slots or arch.experts) * arch.layers * arch.expert_bytes
    return MoeRuntime.open(folder, open_mode("ondemand", folder), budget_bytes, **options)


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("slots", [1, 4, None])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_text_are_those_of_the_unmodified_model(folders, family, slots, implementation):
    if family == "switch_transformers" and implementation != "eager":
        pytest.skip("Switch Transformers knows one implementation")
    expected = load_unmodified(folders[family], experts_implementation=implementation)
    runtime = open_runtime(folders[family], slots)
    if family != "switch_transformers":
        runtime.model.set_experts_implementation(implementation)
    for batch in (1, 3):
        given = prompts(batch)
        more = {"decoder_input_ids": given["input_ids"][:, :4]} if family == "switch_transformers" else {}
        with torch.inference_mode():
            assert torch.equal(runtime.model(**given, **more).logits, expected(**given, **more).logits)
            texts = [one.generate(**given, max_new_tokens=8, do_sample=False) for one in (runtime.model, expected)]
        assert torch.equal(*texts)
    runtime.close()
