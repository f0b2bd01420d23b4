"""Text in and out of a model: its tokenizer, windows and batches of a text, generated text as it comes."""

from __future__ import annotations

import fnmatch
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from ...errors import CheckpointError, ConfigError
from ...models.evaluate import windows_of
from .load import typed
from .place import find_checkpoint, hub_options

# What a tokenizer or a processor is made of, beside the weights.
COMPANIONS = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.model", "tekken.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
_TOKENIZER = ("tokenizer*", "vocab*", "*.model", "tekken.json")
_CHARACTERS = 8  # of a text for each token that is wanted of it: more than any tokenizer takes
_UNFINISHED = "\ufffd"  # the first bytes of a character whose last ones have not come


class ByteTokenizer:
    """A token is a byte: the tokenizer of byte-level models, which have no files for one."""

    eos_token_id = None
    chat_template = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")


def load_tokenizer(path_or_id: str | os.PathLike, vocabulary: int | None = None, **hub: Any) -> Any:
    """The tokenizer of a checkpoint; no code of the checkpoint is run.

    Args:
        path_or_id: a folder, a ``.gguf`` file or a hub id.
        vocabulary: ``vocab_size`` of the model. A folder without a tokenizer and with 256 is read as a byte-level model.
        hub: options of ``from_pretrained`` about the hub: ``revision``, ``token``, ``cache_dir``.

    Returns:
        A tokenizer of Transformers, or a ``ByteTokenizer``, whose tokens are bytes.

    Raises:
        ConfigError: a folder without a tokenizer. CheckpointError: no such checkpoint, or Transformers cannot read its tokenizer.
    """
    path, on_hub = find_checkpoint(path_or_id, hub)
    options = hub | (hub_options(str(path_or_id), hub) if on_hub else {}) | {"trust_remote_code": False}
    if not on_hub and path.is_file():
        return _read(lambda: AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **options), path)
    if not on_hub and not _matching(path, _TOKENIZER):
        if vocabulary == 256:
            return ByteTokenizer()
        raise ConfigError(
            "the checkpoint has no tokenizer",
            value=str(path),
            limit="tokenizer.json or another tokenizer's files; none for a byte-level model (vocab_size 256)",
            remedy="Copy the tokenizer's files of the original model there.",
        )
    return _read(lambda: AutoTokenizer.from_pretrained(path_or_id, **options), path_or_id)


def _read(load: Callable[[], Any], path: str | os.PathLike) -> Any:
    try:
        return typed(load, path)
    except CheckpointError as error:
        raise CheckpointError(
            f"the tokenizer of {Path(path).name} cannot be read",
            value=error.value,
            limit="a tokenizer that this version of transformers knows",
            remedy="Copy the tokenizer's files of the original model to a folder with the weights, or update transformers.",
        ) from error


def copy_companions(path_or_id: str | os.PathLike, directory: Path, **hub: Any) -> list[str]:
    """Copy the files of the tokenizer and of the processor of a checkpoint into a folder, as they are; returns their names.

    Those of a ``.gguf`` file are written by Transformers; a warning says if it cannot.
    """
    path, on_hub = find_checkpoint(path_or_id, hub)
    if not on_hub and path.is_file():
        try:
            tokenizer = load_tokenizer(path)
        except CheckpointError as error:
            warnings.warn(f"no tokenizer was written: {error}", stacklevel=2)
            return []
        return [Path(name).name for name in tokenizer.save_pretrained(directory)]
    if on_hub:
        from huggingface_hub import snapshot_download

        options = hub | hub_options(str(path_or_id), hub)
        path = Path(typed(lambda: snapshot_download(str(path_or_id), allow_patterns=list(COMPANIONS), **options), path_or_id))
    names = _matching(path, COMPANIONS)
    for name in names:
        shutil.copyfile(path / name, directory / name)
    return names


def is_companion(name: str) -> bool:
    """Is this the name of a tokenizer's or processor's file?"""
    return any(fnmatch.fnmatch(name, pattern) for pattern in COMPANIONS)


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_file() and any(fnmatch.fnmatch(p.name, pattern) for pattern in patterns))


def windows_of_text(tokenizer: Any, text: str, count: int, length: int) -> Tensor:
    """The first ``count`` windows of ``length`` tokens of a text, as :func:`fp4_inductor.models.evaluate.windows_of` gives them."""
    return windows_of(tokenizer.encode(text[: count * length * _CHARACTERS]), count, length)


def batches_of_text(tokenizer: Any, text: str, count: int, length: int) -> list[dict[str, Any]]:
    """``calibration=`` of the configs: the first ``count`` windows of a text, one a batch."""
    return [{"input_ids": row[None, :-1], "use_cache": False} for row in windows_of_text(tokenizer, text, count, length)]


def python_reference() -> str:
    """The language reference that comes with Python: a text that needs no file."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def prompt_tokens(tokenizer: Any, prompt: str, chat: bool) -> Tensor:
    """int64 ``[1, T]``. ``chat``: put the prompt into the tokenizer's chat template, as a user's message."""
    if chat:
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)  # the template has them
    else:
        ids = tokenizer.encode(prompt)
    if not ids:
        raise ConfigError("the prompt is empty", value=repr(prompt), limit="at least one token", remedy="Write a text to continue.")
    return torch.tensor([ids])


class TextStream(BaseStreamer):
    """Gives generated text to ``write`` as it comes, a character never in parts. Tokens of the prompt are left out."""

    def __init__(self, tokenizer: Any, write: Callable[[str], Any]):
        self.tokenizer, self.write = tokenizer, write
        self.count = 0  # generated tokens
        self._prompt = True
        self._ids: list[int] = []  # of the line that is being written
        self._shown = 0

    def put(self, value: Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        ids = value.reshape(-1).tolist()
        self.count += len(ids)
        self._ids += ids
        self._flush(final=False)

    def end(self) -> None:
        self._flush(final=True)

    def _flush(self, final: bool) -> None:
        text = self.tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if not final and text.endswith(_UNFINISHED):
            return
        self.write(text[self._shown :])
        self._shown = len(text)
        if text.endswith("\n"):
            self._ids, self._shown = [], 0


def stream_text(model: Any, tokenizer: Any, ids: Tensor, write: Callable[[str], Any], **options: Any) -> int:
    """``model.generate`` from ``ids`` int64 ``[1, T]``, its text given to ``write`` as it comes; returns how many tokens were generated.

    Args:
        options: of ``generate``.

    Raises:
        ConfigError: a model that cannot generate.
    """
    if not (callable(getattr(model, "can_generate", None)) and model.can_generate()):
        limit = "a model with generate(): a causal language model"
        raise ConfigError("the model writes no text", value=type(model).__name__, limit=limit, remedy="Run a model with a language head.")
    stream = TextStream(tokenizer, write)
    ids = ids.to(model.device)
    end = tokenizer.eos_token_id
    with torch.no_grad():
        model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0 if end is None else end, streamer=stream, **options)
    return stream.count
