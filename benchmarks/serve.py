"""vLLM with its own kernels (Marlin) against vLLM with this package's plugin: milliseconds a token and a prompt, the same engine, one run.

    python benchmarks/serve.py                                   # both models, every row
    python benchmarks/serve.py --models 8b --rows decode,prompt --out serve.csv
    python benchmarks/serve.py --models 8b,30b --at-once         # all four engines share the GPU (139 GiB); saves one start
    python benchmarks/serve.py --models 8b --rows decode --kv fp8 --runner v2    # a KV cache in FP8; vLLM's second model runner
    python benchmarks/serve.py --models 30b --rows "prompt 2048,prompt 2049" --graphs 2048    # a prompt as a CUDA graph, and one that is too long for it
    python benchmarks/serve.py --models tiny --smoke             # on a CPU: what runs, not how fast

A model is a config.json alone with random weights (``load_format="dummy"``), so nothing is fetched or written. Each engine is a
process with compile caches of its own, empty at the start. The engines of a model start together and are asked row by row in
turns, one at a time, so both are measured on the same machine in the same minute. A token's time is (time of 144 tokens - time of
16 tokens) / 128, medians, the whole loop of the engine included. ``ratio``: the plugin's time over Marlin's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WHO = {"marlin": None, "fp4_inductor": "fp4_inductor"}
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FP4_INDUCTOR_CACHE", "CUDA_CACHE_PATH", "VLLM_CACHE_ROOT")
# row -> (kind, batch, tokens of prompt)
ROWS = {
    "start": ("start", 0, 0),
    "decode batch 1 context 512": ("decode", 1, 512),
    "decode batch 8 context 512": ("decode", 8, 512),
    "decode batch 32 context 512": ("decode", 32, 512),
    "decode batch 1 context 8000": ("decode", 1, 8000),
    "decode batch 8 context 8000": ("decode", 8, 8000),
    "decode batch 32 context 2000": ("decode", 32, 2000),
    "prompt 2048": ("prompt", 1, 2048),
    "prompt 8192": ("prompt", 1, 8192),
    "256 requests, 64 at once, 512 in, 128 out": ("throughput", 256, 512),
    "64 requests at once, 512 in, 128 out": ("throughput", 64, 512),  # of on_gpus.py
}
SMOKE = {
    "start": ("start", 0, 0),
    "decode batch 2 context 16": ("decode", 2, 16),
    "prompt 64": ("prompt", 1, 64),
    "8 requests, 4 at once, 16 in, 4 out": ("throughput", 8, 16),
}
PROMPT = re.compile(r"prompt (\d+)")  # of any length, besides those of the tables
LARGE_GRAPHS = (256, 512, 1024, 2048, 4096)  # tokens of a step, of --graphs
GIB = 1 << 30
_ANSWERS = sys.stdout  # of a worker: the pipe to the process that asks
LAYERS = {"8b": 36, "30b": 48, "70b": 80, "tiny": 2}
KV_BYTES = {"8b": 10 * GIB, "30b": 7 * GIB, "70b": 22 * GIB, "tiny": GIB // 4}  # 8 sequences of 8,200 tokens, 64 of 640


def config_of(kind: str, layers: int = 0) -> dict[str, Any]:
    """config.json of a shape, with ModelOpt's NVFP4: linear layers and experts quantized, router and head not. ``layers``: 0 is all of them."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    layers = layers or LAYERS[kind]
    common = {"vocab_size": 151936, "num_attention_heads": 32, "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": False}
    if kind == "8b":
        config = Qwen3Config(**common, hidden_size=4096, intermediate_size=12288, num_hidden_layers=layers, num_key_value_heads=8)
    elif kind == "70b":
        wide = common | {"num_attention_heads": 64, "vocab_size": 128256}
        config = Qwen3Config(**wide, hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_key_value_heads=8)
    elif kind == "30b":
        config = Qwen3MoeConfig(
            **common, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
            norm_topk_prob=True, num_hidden_layers=layers, num_key_value_heads=4,
        )  # fmt: skip
    else:
        tiny = common | {"vocab_size": 512, "num_attention_heads": 4, "head_dim": 64}
        config = Qwen3Config(**tiny, hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_key_value_heads=2)
    out = config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM" if kind == "30b" else "Qwen3ForCausalLM"], "torch_dtype": "bfloat16"}
    skip = ["lm_head", "*mlp.gate"]
    numbers = {"num_bits": 4, "type": "float", "group_size": 16}
    out["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "ignore": skip, "exclude_modules": skip,
        "producer": {"name": "modelopt"}, "config_groups": {"group_0": {"weights": numbers, "input_activations": numbers, "targets": ["Linear"]}},
    }  # fmt: skip
    return out


# --- in a process of its own: one engine, asked over stdin


def worker(args: argparse.Namespace) -> None:
    """Build the engine, say so, then measure each row that a line of stdin names, until there is none."""
    began = time.time()
    # Answers alone go through the pipe; what vLLM prints goes to the log, or a pipe that nobody reads yet would stop it.
    global _ANSWERS
    _ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder = Path(args.folder)
    (folder / "config.json").write_text(json.dumps(config_of(args.worker_model, args.layers)))
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_ALLOW_INSECURE_SERIALIZATION="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0"
    )
    from vllm import LLM

    smoke = args.smoke
    additional = {"fp4_inductor": json.loads(args.additional)} if args.additional and WHO[args.worker] else {}
    ranks: dict[str, Any] = {"tensor_parallel_size": args.tp, "enable_expert_parallel": args.ep, "distributed_executor_backend": "mp"} if args.tp > 1 else {}
    llm = LLM(
        model=str(folder), quantization=WHO[args.worker], load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", disable_log_stats=True,
        max_model_len=128 if smoke else 9000, max_num_seqs=4 if smoke else 64, max_num_batched_tokens=128 if smoke else 8192, enable_prefix_caching=False,
        gpu_memory_utilization=0.05, kv_cache_dtype=args.kv, kv_cache_memory_bytes=kv_bytes(args.worker_model, args) // args.tp, additional_config=additional, enforce_eager=args.eager, **ranks,
        **({} if smoke or not args.graphs else {"compilation_config": {"cudagraph_capture_sizes": [1, 8, 32, 64, *(n for n in LARGE_GRAPHS if n <= args.graphs)]}}),
    )  # fmt: skip
    answer({"ready": 1e3 * (time.time() - began), **versions()})
    if WHO[args.worker]:
        for line in llm.collective_rpc(chosen)[0]:  # of the first rank: they compile the same
            print(f"| {line}", file=_ANSWERS, flush=True)
    for line in sys.stdin:
        name = json.loads(line)
        try:
            answer({"ms": profile(llm, *row_of(name[8:])) if name.startswith("profile ") else measure(llm, *row_of(name))})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def row_of(name: str) -> tuple[str, int, int]:
    found = PROMPT.fullmatch(name)
    return ("prompt", 1, int(found[1])) if found else (ROWS | SMOKE)[name]


def chosen(worker: Any) -> list[str]:
    """What this package chose while a rank's graphs were compiled, and of how many products the parts are summed inside of a launch."""
    import fp4_inductor

    found = fp4_inductor.decisions()
    summed = sum("summed over the ranks in the kernel" in row.note for row in found.rows)
    alone = worker.parallel_config.tensor_parallel_size == 1
    return [*([] if alone else [f"{summed} products are summed over the ranks inside of a launch"]), *str(found).splitlines()]


def answer(what: dict[str, Any]) -> None:
    print(f"@@{json.dumps(what)}", file=_ANSWERS, flush=True)


def versions() -> dict[str, str]:
    from importlib.metadata import version

    import torch

    triton = version("triton") if torch.cuda.is_available() else ""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "triton": triton,
        "vllm": version_of_vllm(),
    }


def version_of_vllm() -> str:
    import vllm

    return vllm.__version__


def ask(llm: Any, batch: int, prompt: int, tokens: int) -> float:
    """Seconds for ``batch`` prompts that come at once."""
    from vllm import SamplingParams

    vocabulary = llm.model_config.get_vocab_size()
    prompts = [{"prompt_token_ids": [random.randrange(vocabulary // 8, vocabulary // 2) for _ in range(prompt)]} for _ in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def measure(llm: Any, kind: str, batch: int, prompt: int) -> float:
    """Milliseconds of one row."""
    if kind == "decode":
        ask(llm, batch, prompt, 4)
        steps = 128 if prompt > 64 else 8
        few, many = (statistics.median(ask(llm, batch, prompt, n) for _ in range(3)) for n in (16, 16 + steps))
        return 1e3 * (many - few) / steps
    if kind == "prompt":
        ask(llm, batch, prompt, 1)
        return 1e3 * statistics.median(ask(llm, batch, prompt, 1) for _ in range(3 if prompt > 4096 else 5))
    return 1e3 * ask(llm, batch, prompt, 128 if prompt > 64 else 4)  # max_num_seqs is how many run at once


def profile(llm: Any, kind: str, batch: int, prompt: int) -> float:
    """Print where the time of a row's kernels goes; 8 tokens, or one prompt."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with torch.profiler.profile(activities=activities) as seen:
        seconds = ask(llm, batch, prompt, 1 if kind == "prompt" else 9)
    by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    rows = sorted((e for e in seen.key_averages() if getattr(e, by) > 0), key=lambda e: -getattr(e, by))
    rows = [e for e in rows if not torch.cuda.is_available() or e.device_type == torch.autograd.DeviceType.CUDA]
    print(f"| profile: {sum(getattr(e, by) for e in rows) / 1e3:.2f} ms in {sum(e.count for e in rows)} kernels", file=_ANSWERS, flush=True)
    for e in rows[:22]:
        print(f"| {getattr(e, by) / 1e3:9.3f} ms {e.count:6d} x {getattr(e, by) / e.count:9.2f} us  {e.key[:110]}", file=_ANSWERS, flush=True)
    return 1e3 * seconds


# --- the process that asks


class Engine:
    """A worker process; its other output goes to ``log``. ``tp``: GPUs that share each layer, or with ``ep`` the experts; ``env``: its own variables."""

    def __init__(self, who: str, model: str, args: argparse.Namespace, work: Path, tp: int = 1, ep: bool = False, env: dict[str, str] | None = None):
        name = f"{model}-{who}" + (f"-{'ep' if ep else 'tp'}{tp}" if tp > 1 else "")
        self.who, self.model, self.log = who, model, Path(args.logs) / f"serve-{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        home = work / name
        (home / "model").mkdir(parents=True)
        command = [sys.executable, __file__, "--worker", who, "--worker-model", model, "--folder", str(home / "model"), "--additional", args.additional]
        command += ["--layers", str(args.layers), "--tp", str(tp), "--kv", args.kv, "--cache-gib", str(args.cache_gib), "--graphs", str(args.graphs)]
        command += [f"--{name}" for name, wanted in (("smoke", args.smoke), ("eager", args.eager), ("ep", ep)) if wanted]
        env = os.environ | {name: str(home / name) for name in CACHES} | (env or {})
        if args.runner:
            env["VLLM_USE_V2_MODEL_RUNNER"] = str(int(args.runner == "v2"))
        self.process = subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"))
        self.facts: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """The next answer; what is printed before it goes to stdout."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@@"):
                return json.loads(line[2:])
            if line.startswith("| "):
                print(f"{self.model} {self.who} {line.rstrip()[:180]}", flush=True)
        tail = self.log.read_text()[-3000:]
        return {"error": f"the engine ended ({self.process.wait()})\n{tail}"}

    def send(self, name: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(name) + "\n")
            self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def run(models: list[str], rows: list[str], args: argparse.Namespace, work: Path, write: Any) -> None:
    """Start the engines of ``models`` together, ask each row of all of them."""
    engines = {(model, who): Engine(who, model, args, work) for model in models for who in args.who.split(",")}
    ready = {key: engine.read() for key, engine in engines.items()}
    for key in [key for key, facts in ready.items() if "error" in facts]:
        print(f"{key}: {ready.pop(key)['error']}", flush=True)
        engines.pop(key).close()
    print(f"engines stand: { {key: round(facts['ready'] / 1e3, 1) for key, facts in ready.items()} } s", flush=True)
    for name in rows:
        for model in models:
            times: dict[str, float] = {}
            for who in args.who.split(","):
                if (model, who) not in engines:
                    continue
                found = {"ms": ready[model, who]["ready"]} if name == "start" else engines[model, who].send(name)
                if "error" in found:
                    print(f"{model} {who} {name}: {found['error']}", flush=True)
                    continue
                times[who] = found["ms"]
                ratio = times[who] / times["marlin"] if who != "marlin" and "marlin" in times else None
                write(ready[model, who], model, name, who, times[who], ratio)
    for name in args.profile:
        for (model, _), engine in engines.items():
            if "error" in (found := engine.send(f"profile {name}")):
                print(f"{model} profile: {found['error']}", flush=True)
    for engine in engines.values():
        engine.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of vLLM that both engines get. All but ``--cache-gib`` are a part of the rows' names."""
    parser.add_argument("--kv", default="auto", help="vLLM's --kv-cache-dtype: fp8")
    parser.add_argument("--runner", choices=("v1", "v2"), help="vLLM's model runner; default: its own choice")
    parser.add_argument("--graphs", type=int, default=64, help="a step of up to so many tokens is a CUDA graph; 0: as vLLM and the plugin choose")
    parser.add_argument("--cache-gib", type=float, default=0, help="GiB of a model's KV cache; default: what every row needs")


def kv_bytes(model: str, args: argparse.Namespace) -> int:
    """Of all ranks together."""
    return int(args.cache_gib * GIB) or KV_BYTES[model]


def named(row: str, args: argparse.Namespace) -> str:
    graphs = {0: ", CUDA graphs by default", 64: ""}.get(args.graphs, f", CUDA graphs up to {args.graphs} tokens")
    return row + ("" if args.kv == "auto" else f", KV cache in {args.kv}") + (f", {args.runner} runner" if args.runner else "") + graphs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b,30b", help="8b, 30b, 70b, tiny")
    parser.add_argument("--layers", type=int, default=0, help="default: all of them")
    parser.add_argument(
        "--rows", default="", help='start, decode, prompt, throughput (kinds), or whole names, with commas; default: all; "prompt N" may have any N'
    )
    parser.add_argument("--who", default="marlin,fp4_inductor")
    parser.add_argument("--at-once", action="store_true", help="start the engines of all models together; else model by model")
    parser.add_argument("--additional", default="", help="JSON for the plugin, e.g. '{\"bounds\": [1, 16]}'")
    add_options(parser)
    parser.add_argument("--profile", default=[], action="append", help="name of a row to profile at the end, may be repeated")
    parser.add_argument("--out", default="serve.csv")
    parser.add_argument("--logs", default=".", help="folder of the engines' logs")
    parser.add_argument("--eager", action="store_true", help="nothing is compiled")
    parser.add_argument("--smoke", action="store_true", help="tiny numbers, for a CPU")
    for hidden in ("worker", "worker-model", "folder"):
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    parser.add_argument("--tp", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--ep", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    import csv
    import datetime

    table = SMOKE if args.smoke else ROWS
    wanted = [part.strip() for part in args.rows.split(",") if part.strip()]
    rows = [name for name, (kind, _, _) in table.items() if not wanted or kind in wanted or name in args.rows]
    rows += [name for name in wanted if name not in table and PROMPT.fullmatch(name)]
    models = args.models.split(",")
    with open(args.out, "w", newline="") as file, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        writer = csv.writer(file)
        writer.writerow(["gpu", "torch", "triton", "vllm", "commit", "date", "model", "row", "who", "ms", "ratio"])

        def write(facts: dict[str, Any], model: str, row: str, who: str, ms: float, ratio: float | None) -> None:
            line = [facts["gpu"], facts["torch"], facts["triton"], facts["vllm"], commit(), datetime.date.today().isoformat(), model, named(row, args), who]
            writer.writerow([*line, f"{ms:.3f}" if ms < 100 else f"{ms:.1f}", "" if ratio is None else f"{ratio:.3f}"])
            file.flush()
            print(f"{model} {row}: {who} {ms:.3f} ms{'' if ratio is None else f', {ratio:.3f}x'}", flush=True)

        for group in [models] if args.at_once else [[model] for model in models]:
            run(group, rows, args, Path(work), write)


def commit() -> str:
    found = os.environ.get("FP4_COMMIT", "")
    return found or subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
