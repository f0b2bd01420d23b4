"""Checkpoints that the tests inside vLLM serve: the language models of examples/assets and random ones, quantized and written in one of the formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

PLAIN = "four_over_six"


COMMON = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.3, "eos_token_id": None, "pad_token_id": 0}
RANDOM: dict[str, tuple[str, dict[str, Any]]] = {
    "gptoss": ("GptOssConfig", {"sliding_window": 8, "max_position_embeddings": 131072}),  # a window in one of the layers
    "ownmixtral": ("MixtralConfig", {}),
}


def random(name: str) -> Any:
    """A model of :data:`RANDOM`, whose biases and sinks are not zero."""
    import transformers

    torch.manual_seed(0)
    kind, options = RANDOM[name]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**COMMON, **options), dtype=torch.bfloat16)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("bias", "sinks")):
                parameter.normal_()
    return model


def quantized(name: str, assets: Path, **options: Any) -> Any:
    """``"dense"``, ``"moe"`` or ``"sparse"`` (2:4) of the models of examples/assets, or of :data:`RANDOM`, in NVFP4; with ``"_sparse"`` pruned here."""
    from transformers import AutoModelForCausalLM

    import fp4_inductor
    from fp4_inductor import NVFP4Config, Sparse24Config

    source, *pruned = name.split("_")
    if source == "sparse":
        config: Any = Sparse24Config()
    else:
        config = Sparse24Config(pruning="magnitude", accept_loss=True) if pruned else NVFP4Config(scale_search=PLAIN, **options)
    folder = assets / ("austen_sparse24" if source == "sparse" else f"austen_{source}")
    model = random(source) if source in RANDOM else AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return fp4_inductor.quantize_model(model, config, progress=False)


def write(name: str, assets: Path, target: Path) -> None:
    """``name``: model, a hyphen, format (``modelopt``, ``compressed``, ``native``, ``transformers``); in between ``-fp8`` or ``-nvfp4`` for the head."""
    import fp4_inductor

    model, *head, form = name.split("-")
    packed = quantized(model, assets, **({"lm_head": head[0]} if head else {}))
    if form == "native":
        fp4_inductor.save(packed, target)
    elif form == "transformers":
        packed.save_pretrained(target)
    else:
        fp4_inductor.export_pretrained(packed, target, {"modelopt": "modelopt", "compressed": "compressed-tensors"}[form])
