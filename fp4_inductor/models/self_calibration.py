"""Calibration without data: a language model writes the text its activations are measured on.

Source: Liu et al., "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models" (2023). Its own samples
resemble what it was trained on; random tokens do not (measured on the bundled byte-level model: added nats per byte
0.006 with its own text, 0.010 with random bytes, 0.007 without calibration).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import CalibrationError, NonFiniteError
from ..generation.aside import aside
from ..generation.loop import TheirsError, generate_here
from ..generation.options import LoopOptions
from .calibrate import evaluating

SEQUENCES, TOKENS = 16, 64
# Writing is one pass over the weights per token: about a minute for this many on a desktop CPU.
_CPU_PARAMETERS = 2_000_000_000
SMALL = 1_000_000_000
_SEED = 0
AT_ONCE = 512  # sequences: each needs a cache, and scores for the whole vocabulary
_TOP = 50
# Of all tokens less likely ones come as in real text. SmolLM2-135M by "gptq" on 16,384 tokens: KL on a novel and a manual 0.0609 and 0.0521; of the 50
# likeliest, four texts: 0.063 to 0.067 and 0.053 to 0.057.
ALL = 0
_SMALLEST = 2.0**-24  # whose logarithms are finite, as are those of what is left of 1


def is_quick(model: Any) -> bool:
    """Is ``model`` on a GPU, and of less than a billion parameters? Then text costs little time, and many sequences at once little memory."""
    return next(model.parameters()).device.type == "cuda" and sum(p.numel() for p in model.parameters()) < SMALL


def why_not(model: Any) -> str | None:
    """Why ``model`` cannot write its own calibration text in reasonable time; None if it can be tried."""
    can_generate = getattr(model, "can_generate", None)
    if not callable(can_generate) or not can_generate():
        return f"{type(model).__name__} has no generate()"
    if getattr(model.config, "is_encoder_decoder", False):
        return "an encoder-decoder writes only in answer to an input"
    if _vocabulary(model) is None:
        return "its config has no vocab_size"
    parameters = sum(p.numel() for p in model.parameters() if p.device.type == "cpu")
    if parameters > _CPU_PARAMETERS:
        return f"{parameters / 1e9:.1f} G parameters on the CPU (limit {_CPU_PARAMETERS / 1e9:.0f} G)"
    return None


def write(
    model: Any,
    sequences: int | None = None,
    tokens: int | None = None,
    random_first: int = 0,
    seed: int = _SEED,
    at_once: int | None = None,
    until: float = math.inf,
    likeliest: int = _TOP,
) -> list[dict[str, Tensor | bool]]:
    """One batch: ``input_ids`` int64 ``[sequences, tokens]`` (default ``[16, 64]``), sampled from ``model`` at temperature 1 after a first token.

    The same model gives the same text on the same device, whatever other threads do; torch's own random generators are not used.

    Args:
        random_first: so many of the sequences, the last ones of each part, begin with a token drawn from the whole vocabulary, not with the beginning
            of a text.
        seed: another one gives another text.
        at_once: how many sequences are a part, which is written side by side; another number gives another text, if there are more.
        until: ``time.monotonic()``. At least one part is written, and no part that would not end by then: fewer sequences.
        likeliest: each token is one of so many that are most likely; 0: of all.

    Raises:
        CalibrationError: the model cannot write, or failed to; names the reason.
    """
    reason, cause = why_not(model), None
    if reason is None:
        try:
            with evaluating(model):
                first = _first_tokens(model, sequences or SEQUENCES, random_first, seed, at_once or AT_ONCE)
                return [{"input_ids": _sample(model, first, tokens or TOKENS, seed, until, likeliest), "use_cache": False}]
        except Exception as error:
            reason, cause = f"generate() failed with {type(error).__name__}: {error}".splitlines()[0], error
    raise CalibrationError(
        "the model cannot write its own calibration text",
        value=reason,
        limit='a causal language model of transformers (calibration="self")',
        remedy='Pass calibration=[batch, ...], or use scale_search="four_over_six".',
    ) from cause


def _sample(model: Any, first: list[Tensor], tokens: int, seed: int, until: float, likeliest: int) -> Tensor:
    device = next(model.parameters()).device
    # Past its positions a model would read beyond a table.
    new = min(tokens, positions(model) or tokens) - 1
    if device.type != "cuda":
        return _in_parts(first, until, _plain(model, new, seed, likeliest))
    # Torch's FlashAttention gives other bits from one run to the next where one token attends to more than 128 (torch 2.11 on an H100).
    with sdpa_kernel(SDPBackend.MATH):
        try:
            with aside(model):
                return _in_parts(first, until, _captured(model, new, seed, likeliest))
        except (NonFiniteError, TheirsError):
            # In Transformers' loop scores that are no numbers are replaced: calibration names the layer that they come from.
            return _in_parts(first, until, _plain(model, new, seed, likeliest))


def _in_parts(first: list[Tensor], until: float, write_part: Callable[[Tensor, int], Tensor]) -> Tensor:
    """int64 ``[sequences, tokens]`` on the device; parts wait on the CPU."""
    start, parts = time.monotonic(), []
    for i, part in enumerate(first):
        parts.append(write_part(part, i))
        device = parts[-1].device
        if len(first) > 1:
            parts[-1] = parts[-1].cpu()
        now = time.monotonic()
        if now + (now - start) / len(parts) > until:
            break
    return torch.cat(parts).to(device)


def _captured(model: Any, new: int, seed: int, likeliest: int) -> Callable[[Tensor, int], Tensor]:
    """By the loop of :func:`fp4_inductor.generate`: one CUDA graph a token."""
    options: dict[str, Any] = dict(do_sample=True, temperature=1.0, top_k=likeliest, top_p=1.0, repetition_penalty=1.0, max_new_tokens=new, min_new_tokens=new)

    def write_part(first: Tensor, i: int) -> Tensor:
        first = first.to(model.device)
        loop = LoopOptions(seed=(seed << 32) + i, compiled=False)
        return generate_here(model, first, loop, attention_mask=torch.ones_like(first), pad_token_id=0, **options)

    return write_part


def _plain(model: Any, new: int, seed: int, likeliest: int) -> Callable[[Tensor, int], Tensor]:
    """By the loop of Transformers."""
    from transformers import GenerationConfig, LogitsProcessorList

    plain = GenerationConfig(
        do_sample=False,  # the largest score, which is a sample once Sampler has added its noise
        repetition_penalty=1.0,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
        cache_implementation="dynamic",  # a static cache would compile the dense model first
        disable_compile=True,
        remove_invalid_values=True,  # NaN logits would end in a device-side assertion; calibration names them instead
    )
    processors = LogitsProcessorList([Sampler(seed, likeliest)])

    def write_part(first: Tensor, i: int) -> Tensor:
        first = first.to(model.device)
        return model.generate(inputs=first, attention_mask=torch.ones_like(first), generation_config=plain, logits_processor=processors)

    return write_part


def positions(model: Any) -> int | None:
    """How many positions ``model`` has, where its config says so."""
    found = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


class Sampler:
    """A logits processor after which the largest score is a sample at temperature 1 of the ``likeliest`` tokens; 0: of all.

    It draws from a generator of its own. Torch's generators belong to the whole process: what other threads draw from them would
    change what the model writes, and saving and restoring their state would make other threads draw the same numbers twice.
    Source: Gumbel (1954); the largest of log p + Gumbel noise is distributed as p.
    """

    def __init__(self, seed: int, likeliest: int = _TOP):
        self.seed, self.likeliest = seed, likeliest
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if scores.device not in self._generators:
            self._generators[scores.device] = torch.Generator(scores.device).manual_seed(self.seed)
        uniform = torch.rand(scores.shape, generator=self._generators[scores.device], device=scores.device, dtype=torch.float32)
        noise = -torch.log(-torch.log(uniform.clamp(_SMALLEST, 1 - _SMALLEST)))
        if not self.likeliest:
            return scores.float() + noise
        least = scores.topk(min(self.likeliest, scores.shape[-1]), -1).values[..., -1:]
        return torch.where(scores < least, -float("inf"), scores.float() + noise)


def _first_tokens(model: Any, sequences: int, random_first: int, seed: int, at_once: int) -> list[Tensor]:
    """``[part, 1]`` for each part of ``at_once``: the beginning-of-text token where the model has one, and tokens at random for the rest."""
    size = _vocabulary(model) or 1
    begin = _begin(model, size)
    found = []
    for i, done in enumerate(range(0, sequences, at_once)):
        part = min(at_once, sequences - done)
        first = torch.randint(size, (part, 1), generator=torch.Generator().manual_seed(seed + i))
        if begin is not None:
            first[: part - part * random_first // sequences] = begin
        found.append(first)
    return found


def _begin(model: Any, size: int) -> int | None:
    """The token that a text begins with, where the model's configs say so."""
    for config in (getattr(model, "generation_config", None), model.config):
        begin = getattr(config, "bos_token_id", None)
        if isinstance(begin, int) and 0 <= begin < size:
            return begin
    return None


def _vocabulary(model: Any) -> int | None:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    size = getattr(config, "vocab_size", None)
    return size if isinstance(size, int) and size > 0 else None
