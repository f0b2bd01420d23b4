"""Run by test_finetune.py on every rank: two steps of LoRA training of a quantized model under DDP, then under FSDP2, on this rank's half of the batch."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn

import fp4_inductor
from fp4_inductor.modules.bits import BitBuffers
from lowering_tests.models.conftest import build

IDS = torch.arange(48).reshape(4, 12) * 5 % 128
STEPS = 2


def adapted(seed: int = 0) -> nn.Module:
    """A quantized Qwen2 with LoRA; its dense weights depend on ``seed``."""
    model = build("qwen2")
    with torch.no_grad():
        torch.manual_seed(seed)
        for p in model.parameters():
            p += 1e-3 * seed * torch.randn_like(p)
    fp4_inductor.quantize_model(model, progress=False)
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def train(model: nn.Module, ids: torch.Tensor) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def main(out: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = IDS[rank::2]

    # The ranks' models differ: DDP gives all of them the first rank's, packed weights included.
    model = adapted(seed=rank)
    ddp = nn.parallel.DistributedDataParallel(model)
    sent = [n for n, _ in ddp.named_buffers() if n.removeprefix("module.") not in ddp.parameters_to_ignore]
    train(ddp, mine)
    packed = {
        f"{n}.{k}": b.contiguous().view(-1).view(torch.uint8) for n, m in model.named_modules() if isinstance(m, BitBuffers) for k, b in m.named_buffers()
    }
    torch.save({"weights": trained(model), "packed": packed, "sent": sent}, f"{out}.ddp.{rank}.pt")

    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = adapted()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    train(model, mine)
    whole = {n: p.detach().full_tensor() for n, p in model.named_parameters() if p.requires_grad and isinstance(p, DTensor)}
    torch.save({"weights": whole}, f"{out}.fsdp.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


if __name__ == "__main__":
    main(sys.argv[1])
