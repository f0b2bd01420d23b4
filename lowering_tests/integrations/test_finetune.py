"""Training of quantized models by what people train with: DistributedDataParallel, FSDP2, Transformers' Trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

import fp4_inductor
from fp4_inductor import errors
from lowering_tests.integrations import finetune_ranks
from lowering_tests.integrations.test_parallel import free_port
from lowering_tests.models.conftest import build

SCRIPT = Path(finetune_ranks.__file__)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two processes saved after training under DDP and under FSDP2."""
    out = tmp_path_factory.mktemp("ranks") / "r"
    root = SCRIPT.parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), str(SCRIPT), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {kind: [torch.load(f"{out}.{kind}.{rank}.pt", weights_only=True) for rank in range(2)] for kind in ("ddp", "fsdp")}


@pytest.fixture(scope="module")
def alone():
    """The same training in one process, on the whole batch."""
    model = finetune_ranks.adapted()
    finetune_ranks.train(model, finetune_ranks.IDS)
    return model


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_what_one_does(ranks, alone, kind):
    want = finetune_ranks.trained(alone)
    start = finetune_ranks.trained(finetune_ranks.adapted())
    for rank in ranks[kind]:
        assert rank["weights"].keys() == want.keys()
        for name, p in want.items():
            moved = (p - start[name]).norm()
            assert moved > 0 and (rank["weights"][name] - p).norm() < 1e-3 * moved, name


def test_packed_weights_are_the_first_rank_s_and_are_not_sent_again(ranks, alone):
    first, second = (rank["packed"] for rank in ranks["ddp"])
    own = dict(alone.named_buffers(remove_duplicate=False))
    assert first.keys() == second.keys()
    for name, t in first.items():
        assert torch.equal(t, second[name]) and torch.equal(t, own[name].contiguous().view(-1).view(torch.uint8)), name
    assert ranks["ddp"][0]["sent"] and not any("qdata" in n or "scale" in n for n in ranks["ddp"][0]["sent"])  # rotary tables are


def trainer(model, folder, **options):
    import transformers

    data = [{"input_ids": row, "labels": row} for row in finetune_ranks.IDS]
    arguments = dict(output_dir=str(folder), per_device_train_batch_size=2, max_steps=4, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True)
    return transformers.Trainer(model, transformers.TrainingArguments(**arguments | options), train_dataset=data)


@torch.no_grad()
def loss(model) -> float:
    return model(input_ids=finetune_ranks.IDS, labels=finetune_ranks.IDS).loss.item()


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "bf16": True}], ids=["plain", "checkpointing, bf16"])
def test_trainer_trains_adapters(tmp_path, options):
    model = get_peft_model(fp4_inductor.quantize_model(build("llama"), progress=False), LoraConfig(target_modules="all-linear"))
    run = trainer(model, tmp_path, save_steps=4, **options)
    before = loss(model)
    run.train()
    assert loss(model) < before - 0.01
    assert (tmp_path / "checkpoint-4" / "adapter_model.safetensors").exists()


def test_trainer_does_not_train_what_is_left_over(tmp_path):
    model = fp4_inductor.quantize_model(build("llama"), progress=False)
    with pytest.raises(errors.ConfigError, match=r"cannot be trained.*14 quantized layers.*embed_tokens.*get_peft_model"):
        trainer(model, tmp_path)
    model.half().float()  # what Transformers refuses for the models that it calls quantized
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name)
    trainer(model, tmp_path)  # somebody chose the norms
