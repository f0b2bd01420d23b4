"""The commands on good input: what they write, print and return."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

import fp4_inductor
from fp4_inductor import cli
from lowering_tests.cli.commands import DENSE, MOE, NOVEL, ROOT, SPARSE, inside
from lowering_tests.foreign import MODELOPT, bits, write_gguf
from lowering_tests.models.conftest import build

QUICK = "from fp4_inductor.models import scale_choice; scale_choice.SECONDS = 0.0"  # the default without "gptq"
FORMATS = ("native", "transformers", "modelopt", "compressed-tensors")
COMMANDS = ("quantize", "inspect", "verify", "recover", "export", "explain", "run")


def test_the_entry_point_is_the_module():
    """What pip installs as fp4-inductor and ``python -m fp4_inductor`` are one function."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"fp4-inductor": f"{cli.main.__module__}:{cli.main.__name__}"}
    assert "from .cli import main" in (ROOT / "fp4_inductor" / "__main__.py").read_text()


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_complete_and_fits(fp4, command):
    out = fp4(*filter(None, (command, "--help"))).must().out
    assert max(map(len, out.splitlines())) <= 80
    if not command:
        assert set(re.findall(r"^    (\w+) ", out, re.MULTILINE)) == set(COMMANDS)
        assert "exit status:" in out and "130" in out
        return
    assert f"example:\n  fp4-inductor {command} " in out
    actions = cli.parser()._subparsers._group_actions[0].choices[command]._actions
    assert [a.dest for a in actions if not a.help] == []


def test_formats_are_those_of_the_library():
    from fp4_inductor.cli import quantize
    from fp4_inductor.integrations.pretrained import write

    assert quantize.FORMATS == write.FORMATS == FORMATS


def test_no_arguments_show_the_help(fp4):
    done = fp4().must(2)
    assert "COMMAND" in done.err and done.out == ""


@pytest.mark.parametrize("format", FORMATS)
def test_quantized_folders_are_read_back(fp4, written, format):
    folder = written(format)
    found = fp4("inspect", folder, "--json").must().json
    assert (found["format"], found["damage"], found["read"]) == (format, [], True)
    weights = [t for t in found["tensors"] if t["quantized"]]
    assert len(weights) == 35 and {t["format"] for t in weights} == {"nvfp4"}
    assert sum(found["files"].values()) == sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    loaded = fp4_inductor.load_pretrained(folder)
    assert fp4_inductor.report(loaded).coverage == 100.0
    assert {f"{layer.name}.weight": list(layer.shape) for layer in fp4_inductor.report(loaded).layers} == {t["name"]: t["shape"] for t in weights}


def test_quantize_prints_the_report_and_says_where_it_is(fp4, tmp_path):
    done = fp4("quantize", MOE, tmp_path / "out", "--scale-search", "amax", "--ignore", "re:.*layers.0.self_attn", "--lm-head", "nvfp4").must()
    assert re.search(r"quantized +\d+ layers", done.out) and "re:.*layers.0.self_attn" in done.out
    assert done.out.endswith(f"written to {tmp_path / 'out'}\n")
    assert [line.split()[0] for line in done.err.splitlines()] == ["loading", "quantizing", "writing"]
    assert "fp8" not in done.out and any(r.name == "lm_head" for r in fp4_inductor.report(fp4_inductor.load_pretrained(tmp_path / "out")).layers)


def test_quantize_as_json(fp4, tmp_path):
    done = fp4(
        "quantize", DENSE, tmp_path / "out", "--calibration", NOVEL, "--calibration-tokens", "600", "--scale-search", "activation", "--json", "-q"
    ).must()
    assert done.err == ""
    found = done.json
    assert (found["out"], found["format"], found["coverage"], len(found["layers"])) == (str(tmp_path / "out"), "native", 100.0, 35)
    assert "scale_search=activation" in found["config"]


@pytest.mark.parametrize("format", ["native", "transformers"])
def test_sparse_quantization(fp4, tmp_path, format):
    fp4("quantize", SPARSE, tmp_path / "out", "--sparse", "existing", "-q", "--format", format).must()
    done = fp4("inspect", tmp_path / "out").must()
    assert re.search(r"quantized +35 tensors.* 3\.50 bits a weight", done.out)
    assert re.search(r"^ +5  sparse24_nvfp4  192x512 ", done.out, re.MULTILINE)


def test_inspect_shows_every_tensor_on_request(fp4):
    short, long = (fp4("inspect", MODELOPT, *more).must().out for more in ((), ("--every", "--headers")))
    assert "model.layers.0-1.mlp.{gate_proj,up_proj}.weight" in short and "every value was read" in short
    assert "model.layers.1.mlp.up_proj.weight" in long and "no value was read" in long
    assert max(map(len, short.splitlines()[1:])) <= 80


def test_export_keeps_codes_and_scales(fp4, written, tmp_path):
    """native -> modelopt -> transformers -> native: the tensors of the first and of the last are the same bits, and so are the folders' other files."""
    steps = [("modelopt", written("modelopt"), tmp_path / "a"), ("transformers", tmp_path / "a", tmp_path / "b"), ("native", tmp_path / "b", tmp_path / "c")]
    for format, source, target in steps:
        found = fp4("export", source, target, "--format", format, "--json").must().json
        assert (found["format"], found["weights"]) == (format, 35)
    first, last = (fp4_inductor.load_pretrained(folder).state_dict() for folder in (written("modelopt"), tmp_path / "c"))
    assert first.keys() == last.keys()
    assert [name for name in first if not torch.equal(bits(first[name]), bits(last[name]))] == []


def test_gguf_files(fp4, tmp_path):
    """The file has no tokenizer that Transformers reads: that stops ``run``, while ``export`` says it and writes the weights."""
    pytest.importorskip("gguf")
    write_gguf(build("llama", torch.bfloat16), tmp_path / "m.gguf")
    done = fp4("export", tmp_path / "m.gguf", tmp_path / "out", "--format", "native").must()
    assert "warning: no tokenizer was written" in done.err
    assert "out: native, 14 weights in FP4" in done.out
    a, b = (fp4_inductor.load_pretrained(path).state_dict() for path in (tmp_path / "m.gguf", tmp_path / "out"))
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(bits(a[name]), bits(b[name]))] == []
    assert "the tokenizer of m.gguf cannot be read" in fp4("run", tmp_path / "m.gguf", "--prompt", "x").must(2).err


@torch.no_grad()
def perplexity_of(folder: str, windows: int) -> float:
    """By Transformers' own loss."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor(list(Path(NOVEL).read_bytes()[: windows * 512 + 1]))
    starts = range(0, windows * 512, 512)
    losses = [torch.nn.functional.cross_entropy(model(ids[None, at : at + 512]).logits[0].float(), ids[at + 1 : at + 513]) for at in starts]
    return float(torch.stack(losses).mean().exp())


def test_verify_compares_with_the_dense_model(fp4, written):
    done = fp4("verify", written("native"), "--against", DENSE, "--text", NOVEL, "--windows", "2", "--json").must()
    found = done.json
    assert (found["failed"], found["damage"], found["loads"], found["non_finite"], found["positions"]) == ([], [], True, 0, 1024)
    assert 0.0 < found["kl"] < 0.05 and 0.9 < found["agreement"] < 1.0
    assert found["against"]["perplexity"] == pytest.approx(perplexity_of(DENSE, 2), rel=1e-3)
    assert found["perplexity"] == pytest.approx(found["against"]["perplexity"], rel=0.03)
    same = fp4("verify", written("native"), "--against", written("native"), "--text", NOVEL, "--windows", "1", "--json").must().json
    assert same["kl"] == pytest.approx(0.0, abs=1e-9) and same["agreement"] == 1.0


@pytest.mark.parametrize("format", ["native", "modelopt"])
def test_verify_says_which_layers_lost_it(fp4, written, format):
    """Of an exporter's checkpoint too; on text that the dense model writes."""
    done = fp4("verify", written(format), "--against", DENSE, "--text", "self", "--windows", "4", "--window", "48").must()
    assert re.search(r"text +written by .*austen_dense: 4 windows of 48 tokens", done.out) and max(map(len, done.out.splitlines()[1:])) <= 100
    shares = [float(s) for s in re.findall(r"^ +([\d.]+)% +[\d.]+ +\w+ \(5\)$", done.out, re.MULTILINE)]
    assert len(shares) == 7 and sum(shares) == pytest.approx(100, abs=0.5)
    more = ("--windows", "1", "--window", "32", "--json")
    found = fp4("verify", written(format), "--against", DENSE, "--text", NOVEL, *more).must().json
    assert len(found["layers"]) == 35 and found["notes"] == []
    assert "layers" not in fp4("verify", written(format), "--against", DENSE, "--no-layers", *more).must().json
    assert "layers" not in fp4("verify", written(format), "--against", written("native"), *more).must().json


def test_verify_needs_no_text(fp4, written):
    done = fp4("verify", written("transformers"), "--windows", "1", "--window", "64").must()
    assert "Python's language reference: 1 windows of 64 tokens" in done.out and done.out.endswith("  ok\n")
    assert max(map(len, done.out.splitlines()[1:])) <= 80


@pytest.mark.parametrize(("limit", "why"), [(("--max-perplexity", "1.5"), "perplexity"), (("--max-kl", "1e-6", "--against", DENSE), "KL")])
def test_verify_fails_above_a_limit(fp4, written, limit, why):
    done = fp4("verify", written("native"), "--windows", "1", "--text", NOVEL, *limit).must(1)
    assert re.search(rf"FAILED +{why} [\d.]+ is above {limit[1]}", done.out.replace("1e-06", "1e-6"))


def test_recover_trains_and_writes(fp4, written, tmp_path):
    before = "from fp4_inductor.cli import recover; recover._WINDOW = 32\nfrom fp4_inductor.models import recover; recover.SEQUENCES, recover.TOKENS = 16, 32"
    more = ("--source", DENSE, "--text", NOVEL, "--text-tokens", "512", "--steps", "4", "--batch", "2", "--json")
    found = fp4("recover", written("native"), tmp_path / "out", *more, before=before).must().json
    assert (found["out"], found["steps"], found["tokens"]) == (str(tmp_path / "out"), 4, 4 * 2 * 32)
    assert found["text"].startswith("512 given tokens and ") and found["kept"] == (found["kl_after"] < found["kl_before"])
    assert fp4("inspect", tmp_path / "out", "--json").must().json["format"] == "native"
    assert "a quantized model" in fp4("recover", DENSE, tmp_path / "no", "--source", DENSE).must(2).err


def test_explain_takes_several_sizes(fp4, written):
    done = fp4("explain", written("native"), "--tokens", "1,16", "--tokens", "16", "--json").must()
    calls = done.json["calls"]
    assert [c["tokens"] for c in calls] == [1, 16]
    assert all(len(c["rows"]) == 35 and {r["kernel"] for r in c["rows"]} == {"cpu"} and {r["m"] for r in c["rows"]} == {str(c["tokens"])} for c in calls)
    text = fp4("explain", MOE, "--tokens", "2", "--not-taken").must()
    assert "M = 2, eager, cpu" in text.out and "fp4.moe" in text.out and "quantizing it in memory" in text.err


def test_run_writes_what_the_model_generates(fp4, written):
    model = fp4_inductor.load_pretrained(written("native"))
    prompt = torch.tensor([list(b"They arrived at Bath.")])
    with torch.no_grad():
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :]
    expected = bytes(out.tolist()).decode(errors="replace")
    arguments = ("--max-new-tokens", "12", "--temperature", "0")
    done = fp4("run", written("native"), "--prompt", "They arrived at Bath.", *arguments).must()
    assert done.out == expected + "\n"
    assert re.search(r"^12 tokens in [\d.]+ s: [\d.]+ tokens/s", done.err, re.MULTILINE)
    found = fp4("run", written("native"), "--prompt", "-", "--json", *arguments, stdin="They arrived at Bath.").must().json
    assert (found["text"], found["tokens"]) == (expected, 12)


def test_run_takes_a_dense_model_as_it_is_or_quantizes_it(fp4):
    for more in ((), ("--quantize",)):
        done = fp4("run", DENSE, "--prompt", "They", "--max-new-tokens", "4", "--seed", "1", "--temperature", "0.8", *more, before=QUICK).must()
        assert len(done.out.strip("\n")) >= 1


def test_the_tokenizer_goes_along(fp4, tmp_path):
    """Its files are copied as they are; ``run`` uses it, and its chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<unk>", "<end>", "user", ":", *(f"w{i}" for i in range(60))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"
    config = AutoConfig.from_pretrained(DENSE)
    config.vocab_size, config.num_hidden_layers, config.layer_types = 64, 1, ["full_attention"]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    fast.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.py").mkdir()  # a folder of such a name is no tokenizer file
    for format in ("native", "modelopt"):
        fp4("quantize", tmp_path / "model", tmp_path / format, "--format", format, "--scale-search", "amax").must()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / format / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    chat, raw = (fp4("run", tmp_path / "native", "--prompt", "w1 w2", "--max-new-tokens", "3", *more).must() for more in ((), ("--raw",)))
    assert "chat template" in chat.err and "chat template" not in raw.err
    assert re.fullmatch(r"(\S+ ?){1,3}\n", chat.out)


def test_overwrite_replaces_the_checkpoint_and_nothing_else(fp4, tmp_path):
    out = tmp_path / "out"
    fp4("quantize", DENSE, out, "--format", "modelopt", "--scale-search", "amax", "-q", "--max-shard-size", "500KB").must()
    (out / "README.md").write_text("mine")
    (out / "vocab").mkdir()
    assert len(list(out.glob("model-*.safetensors"))) > 1
    fp4("quantize", DENSE, out, "--scale-search", "amax", "-q", "--overwrite").must()
    assert sorted(inside(out)) == ["README.md", "config.json", "fp4_inductor.json", "fp4_inductor.safetensors", "generation_config.json", "vocab"]
    assert fp4("inspect", out, "--json").must().json["format"] == "native"


def test_json_has_no_nan():
    from fp4_inductor.cli.screen import plain

    body = plain({"a": float("nan"), "b": [float("inf"), 1.5], "c": torch.float16, "d": ROOT, "e": {1: (2, None)}})
    assert json.loads(json.dumps(body, allow_nan=False)) == {"a": None, "b": [None, 1.5], "c": "torch.float16", "d": str(ROOT), "e": {"1": [2, None]}}
