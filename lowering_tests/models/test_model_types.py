"""The model types of Transformers that the default call takes, and docs/model_types.md, which names the others."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lowering_tests.models.model_types import by_auto_model, listed, listed_empty, verdict

# The page is written with a later version than the one installed here: what both have is compared.
LISTED = {name: v for name, v in listed().items() if name in CONFIG_MAPPING}
# One type for each thing that was refused once, and the plainest ones.
SOME = ["llama", "qwen3_moe", "falcon", "longcat_flash", "jetmoe", "aria_text", "wav2vec2", "kimi_k25_vision", "recurrent_gemma", "sam_vision_model", "vit_mae"]
NOT_REFUSED = 0.99


def test_the_page_is_read():
    assert {v.status for v in LISTED.values()} == {"refused", "left"}
    assert len(LISTED) >= 10
    assert {"mobilenet_v1", "poolformer"} < set(listed_empty())
    assert not set(SOME) & set(listed())


@pytest.mark.parametrize("name", sorted(LISTED))
def test_the_page_says_what_the_call_does(name):
    found, said = verdict(name), LISTED[name]
    assert (found.status, "; ".join(found.reasons)) == (said.status, said.reasons[0])
    assert found.share == pytest.approx(said.share, abs=6e-4)


@pytest.mark.parametrize("name", SOME)
def test_a_type_is_taken(name):
    found = verdict(name)
    assert (found.status, found.reasons) == ("taken", [])


@pytest.mark.slow
def test_no_other_type_is_refused():
    found = {name: verdict(name) for name in sorted(CONFIG_MAPPING.keys())}
    built = {name: v for name, v in found.items() if v.status != "not built"}
    assert len(built) > 600
    assert len(built.keys() & by_auto_model()) > 500
    assert {name: v.status for name, v in built.items() if v.status in ("refused", "left")} == {name: v.status for name, v in LISTED.items()}
    assert {name for name, v in built.items() if v.status == "empty"} <= set(listed_empty())
    linear = [name for name, v in built.items() if v.status != "empty"]
    assert sum(built[name].status != "refused" for name in linear) >= NOT_REFUSED * len(linear)
