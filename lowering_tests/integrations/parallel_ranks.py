"""Run by test_parallel.py on every rank: load with tp_plan="auto", compare with one process's logits, say what this rank holds."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from fp4_inductor.modules.packed import PackedWeight
from lowering_tests import ranks

IDS = torch.arange(24).reshape(2, 12) % 128


def main(out: str, paths: list[str]) -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    for i, path in enumerate(paths):
        model = ranks.load_divided(path)
        with torch.no_grad():
            logits = model(input_ids=IDS.to(device), use_cache=False).logits
        packed = {n: m for n, m in model.named_modules() if isinstance(m, PackedWeight)}
        held = {n: [list(m.qdata.shape), int(m.qdata.int().sum()), int(m.scale.view(torch.uint8).int().sum())] for n, m in packed.items()}
        try:
            model.save_pretrained(f"{out}.saved")
            saved = True
        except ValueError:
            saved = False
        torch.save(logits.cpu(), f"{out}.{i}.{dist.get_rank()}.pt")
        ranks.write({"held": held, "saved": saved, "device": str(logits.device)}, f"{out}.{i}")
    ranks.end()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
