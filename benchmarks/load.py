"""How long loading takes against reading the files: an 8B-sized ModelOpt checkpoint of random weights, written here first.

    python benchmarks/load.py                         on a GPU: Llama-3.1-8B's shape, 6 GB of files (12 with the native copy)
    python benchmarks/load.py --layers 4 --device cpu

Both from the page cache (the files were just written, and are read once before anything is timed). ``read``: every byte into one
buffer that is used again; ``read, fresh``: into memory of its own, as a model on the CPU needs it. Medians of ``--repeats``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

import fp4_inductor

SHAPE = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
SHARD = 2_000_000_000


def write(directory: Path, layers: int) -> int:
    """A checkpoint in ModelOpt's layout; returns its bytes."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**SHAPE, num_hidden_layers=layers, max_position_embeddings=4096)
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in AutoModelForCausalLM.from_config(config).state_dict().items()}
    weight_map, shard, size, number, total = {}, {}, 0, 0, 0

    def flush() -> None:
        nonlocal shard, size, number
        number += 1
        file = f"model-{number:05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard, size = {}, 0

    for name, shape in shapes.items():
        if name.endswith("_proj.weight"):
            n, k = shape
            parts = {
                name: torch.randint(0, 256, (n, k // 2), dtype=torch.uint8),
                f"{name}_scale": torch.randint(1, 0x60, (n, k // 16), dtype=torch.uint8).view(torch.float8_e4m3fn),
                f"{name}_scale_2": torch.tensor(1e-4),
            }
        else:
            parts = {name: torch.zeros(shape, dtype=torch.bfloat16)}
        shard |= parts
        size += sum(t.numel() * t.element_size() for t in parts.values())
        total += sum(t.numel() * t.element_size() for t in parts.values())
        if size > SHARD:
            flush()
    flush()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    quantization = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "producer": {"name": "modelopt", "version": "0.47.0"}}
    body = json.loads(config.to_json_string(use_diff=False)) | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(body | {"quantization_config": quantization}))
    return total


def read(directory: Path, fresh: bool) -> None:
    buffer = memoryview(bytearray(1 << 24))
    for path in sorted(directory.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            if fresh:
                file.readinto(memoryview(torch.empty(path.stat().st_size, dtype=torch.uint8).numpy()))  # at most 2 GB a call: SHARD
            else:
                while file.readinto(buffer):
                    pass


def median(do: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        kept = do()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        del kept
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", help="where to write it (default: a temporary directory)")
    args = parser.parse_args()
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=args.directory) as scratch:
        directory = Path(scratch)
        size = write(directory, args.layers)
        read(directory, False)
        again, fresh = (median(lambda fresh=fresh: read(directory, fresh), args.repeats) for fresh in (False, True))
        loading = median(lambda: fp4_inductor.load_pretrained(directory, device=args.device), args.repeats)
        model = fp4_inductor.load_pretrained(directory)
        native = directory / "native"
        fp4_inductor.save(model, native)
        config = model.config
        del model
        from transformers import AutoModelForCausalLM

        ours = median(
            lambda: fp4_inductor.load(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), native, device=args.device), args.repeats
        )
    print(f"{size / 1e9:.2f} GB, {args.layers} layers, to {args.device}; torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'read':24} {again:6.2f} s  {size / again / 1e9:5.1f} GB/s")
    for name, seconds in (("read, fresh memory", fresh), ("load_pretrained", loading), ("load (native)", ours)):
        print(f"{name:24} {seconds:6.2f} s  {size / seconds / 1e9:5.1f} GB/s  {seconds / again:5.2f} x read, {seconds / fresh:5.2f} x read into fresh memory")


if __name__ == "__main__":
    main()
