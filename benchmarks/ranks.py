"""``generate()`` on one GPU and on two through Transformers' tensor parallelism: milliseconds a token, and whether the tokens are equal.

    torchrun --nproc-per-node 2 benchmarks/ranks.py FOLDER --out two     # on_gpus.py calls it, and writes FOLDER

FOLDER is what ``save_pretrained`` of a quantized model wrote. Under torchrun with several processes it is loaded with ``tp_plan="auto"``.
``ms`` is the median of (time of N tokens - time of one token) / (N - 1), greedy tokens. The first process writes what it found to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import decode
import torch
import torch.distributed as dist

import fp4_inductor
from fp4_inductor import NVFP4Config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("ranks.json"))
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--new", type=int, default=129)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--follow", type=Path, help="what another run wrote: its logits, and by how much its first other token was not the likeliest here")
    parser.add_argument("--float32", action="store_true", help="activations in float32: no ties")
    parser.add_argument("--eager", action="store_true", help="nothing is compiled")
    parser.add_argument("--one-shot", action="store_true", help="sums by one_shot_all_reduce over symmetric memory instead of NCCL, where Inductor has it")
    parser.add_argument("--write", choices=list(decode.MODELS), help="only write a model of this shape, with random weights, to FOLDER")
    parser.add_argument("--layers", type=int, default=0, help="of --write; default: all of them")
    args = parser.parse_args()
    if args.write:
        write(args)
        return
    ranks, cuda = int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    if args.one_shot:
        use_one_shot()
    model = load(args.folder, ranks, device, torch.float32 if args.float32 else torch.bfloat16)
    found: dict[str, Any] = {}
    for batch in args.batch:
        torch.manual_seed(0)
        ids = torch.randint(0, min(1000, model.config.vocab_size), (batch, args.context)).to(device)

        def run(new: int, ids: torch.Tensor = ids) -> torch.Tensor:
            return fp4_inductor.generate(model, ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, compiled=not args.eager)

        first, _ = seconds(lambda run=run: run(args.new), device)
        times = []
        for _ in range(args.rounds):
            one, _ = seconds(lambda run=run: run(1), device)
            many, out = seconds(lambda run=run: run(args.new), device)
            times.append(1e3 * (many - one) / (args.new - 1))
        record = fp4_inductor.generation_record(model)
        assert record is not None
        found[str(batch)] = {
            "ms": sorted(times)[len(times) // 2], "first_use_s": first, "tokens": out[:, args.context :].tolist(), "loop": record.loop,
            "notes": [*record.reasons, *record.notes],
        }  # fmt: skip
        if dist.is_initialized() and dist.get_rank():
            continue
        args.out.write_text(json.dumps(found))  # after each batch: a run that is cut off leaves what it has
        print(f"{ranks} rank(s), batch {batch}: {found[str(batch)]['ms']:.3f} ms a token, first use {first:.1f} s, {record}", flush=True)
    logits = logits_of(model, args.context)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(logits, args.out.with_suffix(".pt"))
    if args.follow:
        other = json.loads(args.follow.read_text())
        gaps = {batch: gap_of(model, found[batch]["tokens"], other[batch]["tokens"], args.context, int(batch)) for batch in found if batch in other}
        theirs = torch.load(args.follow.with_suffix(".pt"), weights_only=True)
        args.out.with_suffix(".gaps").write_text(json.dumps(gaps | {"logits": float((theirs - logits).norm() / logits.norm())}))
    if dist.is_initialized():
        fp4_inductor.release_memory(model)  # NCCL waits for the graphs that hold its sums
        dist.barrier()
        dist.destroy_process_group()


def write(args: argparse.Namespace) -> None:
    model = decode.build(args.write, args.layers, "cuda" if torch.cuda.is_available() else "cpu")
    fp4_inductor.quantize_model(model, NVFP4Config("amax"), progress=False)
    model.save_pretrained(args.folder)


def load(folder: Path, ranks: int, device: torch.device, dtype: torch.dtype) -> Any:
    """The model: all of it on ``device``, or this rank's part."""
    import transformers

    if ranks == 1:
        return fp4_inductor.load_pretrained(folder, device_map=str(device), dtype=dtype)
    if hasattr(transformers, "DistributedConfig"):
        return fp4_inductor.load_pretrained(folder, distributed_config=transformers.DistributedConfig(tp_plan="auto"), dtype=dtype)
    return fp4_inductor.load_pretrained(folder, tp_plan="auto", dtype=dtype)


def use_one_shot() -> None:
    """Let Inductor lower small sums to ``symm_mem.one_shot_all_reduce``, which needs no NVLink multicast."""
    import torch._inductor.config as inductor_config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    if not hasattr(inductor_config, "_collective"):
        raise SystemExit(f"torch {torch.__version__}: its Inductor has no choice between sums (--one-shot)")
    inductor_config._collective.auto_select = True
    enable_symm_mem_for_group(dist.group.WORLD.group_name)


def seconds(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, torch.Tensor]:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


@torch.inference_mode()
def logits_of(model: Any, context: int) -> torch.Tensor:
    """float32 ``[V]`` behind a prompt, on the CPU; every rank has to call it."""
    torch.manual_seed(0)
    ids = torch.randint(0, min(1000, model.config.vocab_size), (1, context)).to(model.device)
    return model(ids, use_cache=False, logits_to_keep=1).logits[0, -1].float().cpu()


@torch.inference_mode()
def gap_of(model: Any, here: list[list[int]], other: list[list[int]], context: int, batch: int) -> float:
    """Where the tokens of a row part: how much less likely than the first the other token is here, in standard deviations of the logits; the largest of all rows.

    Two engines round in another order, so a gap of a few bfloat16 steps is a tie.
    """
    torch.manual_seed(0)
    prompts = torch.randint(0, min(1000, model.config.vocab_size), (batch, context))
    worst = 0.0
    for prompt, mine, theirs in zip(prompts, here, other, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if same is None:
            continue
        text = torch.cat([prompt, torch.tensor(mine[:same], dtype=prompt.dtype)])[None].to(model.device)
        logits = model(text, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        worst = max(worst, float((logits.max() - logits[theirs[same]]) / logits.std()))
    return worst


if __name__ == "__main__":
    main()
