"""The options of ``fp4_inductor.generate``, checked before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, DeviceError, DTypeError, ShapeError

# What has no effect on greedy tokens, and the value that asks for nothing.
_OF_SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0,), "top_k": (0,), "top_p": (1.0,), "min_p": (0.0,), "typical_p": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "top_h": (),
}  # fmt: skip
_RANGES: dict[str, tuple[str, Any]] = {
    "temperature": ("a number above 0", lambda x: _is_real(x) and 0 < x < math.inf),
    "top_k": ("a whole number from 0; 0: all tokens", lambda x: _is_whole(x) and x >= 0),
    "top_p": ("a number above 0, up to 1", lambda x: _is_real(x) and 0 < x <= 1),
    "min_p": ("a number from 0 to 1", lambda x: _is_real(x) and 0 <= x <= 1),
    "typical_p": ("a number above 0, up to 1", lambda x: _is_real(x) and 0 < x <= 1),
    "repetition_penalty": ("a number above 0; 1: none", lambda x: _is_real(x) and 0 < x < math.inf),
    "max_new_tokens": ("a whole number from 1", lambda x: _is_whole(x) and x >= 1),
    "min_new_tokens": ("a whole number from 0", lambda x: _is_whole(x) and x >= 0),
    "prompt_lookup_num_tokens": ("a whole number from 1", lambda x: _is_whole(x) and x >= 1),
    "max_matching_ngram_size": ("a whole number from 1", lambda x: _is_whole(x) and x >= 1),
}


@dataclass(frozen=True)
class LoopOptions:
    """How the loop runs.

    Args:
        check_every: steps between two looks at whether all rows have ended.
        seed: of the sampling, 0 to 2**63 - 1; None: a number from torch's generator, which ``torch.manual_seed`` sets.
        compiled: compile prompt and step with ``torch.compile``; None: on CUDA.
        pad_prompts: on CUDA, pad a prompt of up to 4,096 tokens, all rows together, to one of a few lengths and replay a CUDA graph for it, where cache and
            model allow it. Its logits are then those that the kernels for the padded length round to. Its layers are compiled by themselves; a prompt that
            runs as it is is compiled as a whole, which takes longer once.
    """

    check_every: int = 8
    seed: int | None = None
    compiled: bool | None = None
    pad_prompts: bool = True

    def __post_init__(self) -> None:
        if not _is_whole(self.check_every) or self.check_every < 1:
            raise ConfigError("check_every is no number of steps", value=repr(self.check_every), limit="a whole number from 1", remedy="Leave it out for 8.")
        if self.seed is not None and (not _is_whole(self.seed) or not 0 <= self.seed < 2**63):
            raise ConfigError("seed is out of range", value=repr(self.seed), limit="0 to 2**63 - 1, or None", remedy="Leave it out for a random one.")
        if self.compiled not in (None, True, False):
            raise ConfigError("compiled is not a known choice", value=repr(self.compiled), limit="True, False or None", remedy="Leave it out: on CUDA.")
        if not isinstance(self.pad_prompts, bool):
            raise ConfigError("pad_prompts is not a known choice", value=repr(self.pad_prompts), limit="True or False", remedy="Leave it out: True.")


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_real(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and not math.isnan(x)


def check_ranges(given: dict[str, Any]) -> None:
    """Are the numbers that the caller gave in range?

    Raises:
        ConfigError: the first that is not.
    """
    for name, (limit, accepts) in _RANGES.items():
        value = given.get(name)
        if value is not None and not accepts(value):
            greedy = name == "temperature" and value == 0
            remedy = "Write do_sample=False for the likeliest token." if greedy else f"Leave {name} out, or give one in range."
            raise ConfigError(f"{name} is out of range", value=repr(value), limit=limit, remedy=remedy)


def check_together(given: dict[str, Any], do_sample: bool) -> None:
    """Do the options not contradict each other? ``given`` holds what the caller gave, ``do_sample`` what results.

    Raises:
        ConfigError: the first that does.
    """
    if not do_sample:
        for name, neutral in _OF_SAMPLING.items():
            value = given.get(name)
            if value is not None and value not in neutral:
                raise ConfigError(
                    f"{name} has no effect on greedy tokens",
                    value=f"{name}={value!r} with do_sample=False",
                    limit="sampling arguments with do_sample=True",
                    remedy=f"Write do_sample=True, or leave {name} out.",
                )
    least, most = given.get("min_new_tokens"), given.get("max_new_tokens")
    if least is not None and most is not None and least > most:
        raise ConfigError("min_new_tokens is above max_new_tokens", value=least, limit=f"at most {most}", remedy="Give the two in order.")
    if most is not None and given.get("max_length") is not None:
        raise ConfigError(
            "max_new_tokens and max_length are two limits of one thing",
            value=f"max_new_tokens={most}, max_length={given['max_length']}",
            limit="one of them",
            remedy="Leave max_length out; it counts the prompt.",
        )


def check_ids(ids: Any, model: Any) -> None:
    """Are these tokens of ``model``, int64 ``[B, T]``, where the model is?

    Raises:
        DTypeError, ShapeError, DeviceError, ConfigError: they are not.
    """
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        raise DTypeError(
            "ids are no token numbers",
            value=str(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__,
            limit="an int64 tensor [batch, tokens]",
            remedy='Take input_ids of tokenizer(text, return_tensors="pt").',
        )
    if ids.dim() != 2 or 0 in ids.shape:
        raise ShapeError("ids have the wrong shape", value=list(ids.shape), limit="[batch, tokens], neither of them 0", remedy="Write ids[None] for a row.")
    if ids.device != model.device:
        raise DeviceError("ids and the model lie on different devices", value=str(ids.device), limit=str(model.device), remedy="Write ids.to(model.device).")
    embedding = model.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None)
    if isinstance(rows, int) and bool(((ids < 0) | (ids >= rows)).any()):
        raise ConfigError(
            "ids hold a number that is no token of the model",
            value=f"{int(ids.min())} to {int(ids.max())}",
            limit=f"0 to {rows - 1}",
            remedy="Use the model's own tokenizer.",
        )


def check_mask(mask: Any, ids: Tensor, before: int = 0) -> None:
    """Is this an attention mask for ``ids``, padded on the left? ``before``: tokens that the cache holds already.

    Raises:
        ShapeError, ConfigError: it is not.
    """
    lengths = {ids.shape[1], ids.shape[1] + before}
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != ids.shape[0] or mask.shape[1] not in lengths:
        raise ShapeError(
            "attention_mask does not belong to ids",
            value=list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__,
            limit=" or ".join(f"[{ids.shape[0]}, {n}]" for n in sorted(lengths)),
            remedy="Take both from one call of the tokenizer.",
        )
    if bool((mask[:, -1] == 0).any()):
        raise ConfigError(
            "attention_mask is padded on the right",
            value=f"rows {(mask[:, -1] == 0).nonzero().flatten().tolist()}",
            limit="padding on the left, so that every row ends with a token",
            remedy='Set tokenizer.padding_side = "left".',
        )


@dataclass(frozen=True)
class Lookup:
    """``tokens`` drafts a step, behind the longest sequence of at most ``ngram`` last tokens that stood in the text before."""

    tokens: int
    ngram: int = 2

    def __post_init__(self) -> None:
        check_ranges({"prompt_lookup_num_tokens": self.tokens, "max_matching_ngram_size": self.ngram})

    @property
    def queries(self) -> int:
        """Tokens that the model runs on in a step."""
        return self.tokens + 1


def lookup_of(config: Any, assistant: Any = None) -> Lookup | None:
    """What a GenerationConfig asks for; None: no prompt lookup, or drafts that come from elsewhere.

    Raises:
        ConfigError: numbers that are out of range.
    """
    tokens = getattr(config, "prompt_lookup_num_tokens", None)
    others = assistant is not None or getattr(config, "use_mtp", None) or getattr(config, "assistant_early_exit", None) is not None
    return None if tokens is None or others else Lookup(tokens, 2 if config.max_matching_ngram_size is None else config.max_matching_ngram_size)


def check_rows(rows: int) -> None:
    """Is it one row? Rows of which different numbers of drafts are right would need a counter each.

    Raises:
        ConfigError: it is not; Transformers refuses it, too.
    """
    if rows != 1:
        raise ConfigError(
            "prompt lookup is for one row", value=f"{rows} rows", limit="batch 1, num_return_sequences=1", remedy="Leave prompt_lookup_num_tokens out."
        )
