"""A tokenizer of bytes with a chat template, for the language models of examples/assets, whose 256 tokens are bytes."""

from __future__ import annotations

from pathlib import Path

TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def write(folder: Path) -> None:
    """tokenizer.json and its configuration in ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    made = Tokenizer(models.BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE).save_pretrained(folder)
