"""The share of Transformers' model types that the default call takes, and that each refused one is known with its reason."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lowering_tests.models.model_types import verdict

# model type -> what its refusal says. One matrix for each position of a sequence, selected by a tensor of indices ...
REFUSED = {
    "moshi_depth": "a stack of matrices; how MoshiFlexibleLinear uses it is not known",
    # ... attention that reads its weights itself, where it is more than a small share ...
    "bridgetower_vision_model": "nn.MultiheadAttention reads this weight itself",
    "oneformer": "nn.MultiheadAttention reads this weight itself",
    # ... three-dimensional projections contracted by einsum ...
    "xlnet": "a stack of matrices; how XLNetRelativeAttention uses it is not known",
    # ... and layers that simulate integer arithmetic.
    "ibert": "QuantLinear is a linear layer with its own forward",
}
# One type for each thing that was refused once, and the plainest ones.
SOME = [
    "llama",
    "qwen3_moe",
    "falcon",
    "longcat_flash",
    "jetmoe",
    "aria_text",
    "wav2vec2",
    "kimi_k25_vision",
    "recurrent_gemma",
    "siglip_vision_model",
    "sam_vision_model",
    "resnet",
]
NOT_REFUSED = 0.97


@pytest.mark.parametrize("name", SOME)
def test_a_type_is_taken(name):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this Transformers has no {name}")
    found = verdict(name)
    assert found.status in ("taken", "left"), found


@pytest.mark.parametrize("name", ["ibert", "xlnet"])
def test_a_refusal_says_why(name):
    assert REFUSED[name] in verdict(name).reasons


@pytest.mark.slow
def test_the_default_call_takes_nearly_all_model_types():
    found = {name: verdict(name) for name in sorted(CONFIG_MAPPING.keys())}
    built = {name: v for name, v in found.items() if v.status != "not built"}
    assert len(built) > 500
    refused = {name: v.reasons for name, v in built.items() if v.status == "refused"}
    assert {name: any(REFUSED.get(name, "?") in r for r in reasons) for name, reasons in refused.items()} == dict.fromkeys(refused, True)
    linear = [name for name, v in built.items() if v.status != "empty"]  # the others are convolutions from end to end
    assert len(linear) - len(refused) >= NOT_REFUSED * len(linear)
