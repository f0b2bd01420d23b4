"""Every error of the package carries the value, the limit and the remedy."""

import ast
import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import DispatchConfig, errors, quantize_model
from fp4_inductor.kernels import build

ROOT = Path(fp4_inductor.__file__).parent
PARTS = {"value", "limit", "remedy"}
TYPED = {name for name, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.FP4Error)}
# What is raised without being a call of a class of errors.py, and why that is right.
OTHERS = {
    ("__init__.py", "AttributeError"): "the protocol of a module's __getattr__",
    ("tensors/base.py", "IndexError"): "the protocol of iteration and negative indices",
    ("tensors/base.py", "_write_error"): "makes a typed error",
    ("decoding/cache.py", "_fixed_batch"): "makes a typed error",
    ("decoding/handles.py", "_touched"): "makes a typed error",
    ("decoding/handles.py", "too_long"): "makes a typed error",
    ("decoding/handles.py", "AttributeError"): "the protocol of __getattr__",
    ("ops/cached_call.py", "error"): "the typed error that was found",
    ("kernels/kernel.py", "TypeError"): "a kernel of another form: a defect of this package, not of a caller",
    ("kernels/params.py", "TypeError"): "a field that the struct of a kernel does not have: a defect of this package",
    ("kernels/run.py", "TypeError"): "as kernels/kernel.py",
    ("lowerings/forms.py", "TypeError"): "as kernels/kernel.py",
    ("cli/options.py", "ArgumentTypeError"): "the protocol of argparse's types",
    ("checkpoint/build.py", "_not_a_module"): "makes a typed error",
    ("api.py", "nothing_to_quantize"): "makes a typed error",
    ("models/preflight.py", "problems"): "a list of typed errors",
    ("models/preflight.py", "error"): "the typed error over several layers",
    ("formats/packing.py", "type"): "the typed error of the format, with the weight's name before it",
    ("passes/rms_norm.py", "_OtherError"): "a graph is not what is looked for; caught by read",
    ("generation/loop.py", "TheirsError"): "another loop has to run; caught by generate",
    ("generation/session.py", "NotServedError"): "another cache, or another loop, has to be taken; caught by generate",
    ("models/hessian.py", "_ReachedError"): "ends a forward pass whose rest is not needed; caught by Watch.run",
    ("integrations/pretrained/on_the_fly.py", "error"): "a typed error of the plan",
    **{
        (f"checkpoint/readers/{name}.py", "unsupported"): "makes a typed error"
        for name in ("compressed_tensors", "gguf", "modelopt", "native", "torchao", "weight")
    },
    **{(f"checkpoint/writers/{name}.py", "unsupported"): "makes a typed error" for name in ("compressed_tensors", "modelopt")},
    ("checkpoint/gguf_file.py", "wrong"): "makes a typed error",
    ("checkpoint/shards.py", "_no_weights"): "makes a typed error",
    ("integrations/pretrained/export.py", "_cannot"): "makes a typed error",
    ("integrations/vllm/engine.py", "AttributeError"): "how a module says that it has no such name",
    ("integrations/pretrained/gguf.py", "unsupported"): "makes a typed error",
    ("models/calibrate.py", "non_finite"): "makes a typed error",
    **{
        (f"passes/moe/{name}.py", "Unproven"): "caught in passes/moe/find.py: the graph is left alone, and explain() says why"
        for name in ("activation", "grouped", "layer", "layout", "read", "rewrite", "routing", "summand", "sums")
    },
    ("passes/moe/layer.py", "best"): "an Unproven",
    ("passes/moe/sums.py", "stuck"): "an Unproven",
    ("passes/moe/index.py", "Split"): "caught in passes/moe: asks for an index to be split",
    ("passes/moe/index.py", "Unaligned"): "caught in passes/moe: the index is kept as it is",
    ("passes/pointwise.py", "NotPointwise"): "caught in passes/idiom.py: the graph is left alone",
    ("passes/idiom.py", "NotPointwise"): "caught in passes/idiom.py: the graph is left alone",
    ("passes/quantized_cache.py", "NotPointwise"): "caught in the same file: the graph is left alone, and the reason noted",
    ("passes/quantized_cache.py", "_Refused"): "caught in the same file: the graph is left alone, and the reason noted",
}


def sources():
    """All of the package but ``_torch``, which imports nothing of it."""
    for path in sorted(ROOT.rglob("*.py")):
        if "_torch" not in path.parts:
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def name_of(node: ast.expr) -> str:
    """``f`` of ``f``, ``f(...)``, ``f[0]`` and ``module.f(...)``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call):
        return name_of(node.func)
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    return ast.unparse(node)


def test_every_error_gives_value_limit_and_remedy():
    seen, wrong = 0, []
    for file, tree in sources():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and name_of(node) in TYPED):
                continue
            seen += 1
            given = {k.arg: k.value for k in node.keywords if not (isinstance(k.value, ast.Constant) and k.value.value is None)}
            wrong += [f"{file}:{node.lineno} {name_of(node)} lacks {part}" for part in sorted(PARTS - set(given))]
            text = given.get("remedy")
            if isinstance(text, ast.Constant) and not (len(str(text.value)) >= 12 and str(text.value).endswith(".")):
                wrong.append(f"{file}:{node.lineno} {text.value!r} is no sentence")
    assert not wrong, "\n".join(wrong)
    assert seen > 140


def test_nothing_else_is_raised():
    found = set()
    for file, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and node.exc is not None and not (isinstance(node.exc, ast.Call) and name_of(node.exc) in TYPED):
                found.add((file, name_of(node.exc)))
    assert found == set(OTHERS)


def test_an_error_renders_its_three_parts():
    error = errors.ShapeError("what", value=(1, 2), limit="a limit", remedy="Do this.")
    assert str(error) == "what; got (1, 2); accepted: a limit. Do this."
    assert isinstance(error, errors.FP4Error)
    assert isinstance(error, ValueError)
    listed = errors.CoverageError("two layers:\n  - a\n  - b\n", value="2 layers", limit=0, remedy="Do this.")
    assert str(listed) == "two layers:\n  - a\n  - b\ngot 2 layers; accepted: 0. Do this."


@pytest.mark.parametrize("again", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))], ids=["copy", "pickle"])
def test_an_error_survives_the_way_between_processes(again):
    error = again(errors.KernelError("what", value=1, limit=2, remedy="Do this."))
    assert type(error) is errors.KernelError
    assert (str(error), error.value, error.limit, error.remedy) == ("what; got 1; accepted: 2. Do this.", 1, 2, "Do this.")


# --- wrong kinds of arguments ------------------------------------------------------------------------------------


def model():
    return nn.Sequential(nn.Linear(32, 32))


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (lambda path: fp4_inductor.report("model"), errors.ConfigError, r"report\(\) takes a module; got str"),
        (lambda path: fp4_inductor.save({"weight": torch.ones(1)}, path / "new"), errors.ConfigError, r"save\(\) takes a module; got dict"),
        (lambda path: fp4_inductor.load("model", path), errors.ConfigError, r"load\(\) takes a module.*got str"),
        (lambda path: fp4_inductor.load(lambda: 3, path), errors.ConfigError, r"load\(\) takes a module.*got int"),
        (lambda path: fp4_inductor.explain(3), errors.ConfigError, r"explain\(\) takes.*got int"),
        (lambda path: quantize_model(model(), filter_fn="lm_head"), errors.ConfigError, r"filter_fn is not a function; got 'lm_head'"),
        (lambda path: quantize_model(model(), ignore=3), errors.ConfigError, "ignore is a list of names; got 3"),
        (lambda path: quantize_model(model(), device=3.5), errors.DeviceError, "not a device; got 3.5"),
        (lambda path: DispatchConfig(thresholds=5), errors.ConfigError, "thresholds are not .*; got 5"),
        (lambda path: DispatchConfig(thresholds={4: 1}), errors.ConfigError, "thresholds are not .*; got {4: 1}"),
        (lambda path: DispatchConfig(unproven="fast"), errors.ConfigError, "unproven .*'fast'.*default, \"guard\""),
    ],
)
def test_a_wrong_kind_of_argument_is_a_typed_error(tmp_path, call, kind, match):
    fp4_inductor.save(quantize_model(model(), progress=False), tmp_path)
    with pytest.raises(kind, match=match) as caught:
        call(tmp_path)
    assert None not in [getattr(caught.value, part) for part in PARTS]
    assert not (tmp_path / "new").exists()


def test_thresholds_in_a_list_are_hashable():
    assert hash(DispatchConfig(thresholds=[("mid", 8), ("gemv", 1)])) == hash(DispatchConfig(thresholds={"gemv": 1, "mid": 8}))


def test_a_build_cache_that_cannot_be_made_is_a_typed_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FP4_INDUCTOR_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(errors.KernelError, match=r"cannot be made; got .*file.*Set FP4_INDUCTOR_CACHE"):
        build.cache_dir()


def test_a_configuration_that_refuses_to_be_written_is_a_typed_error(tmp_path):
    class Config:
        def save_pretrained(self, path):
            raise ValueError("temperature without do_sample")

    broken = model()
    broken.generation_config = Config()
    with pytest.raises(errors.CheckpointError, match="generation_config cannot be written; got ValueError: temperature without do_sample"):
        fp4_inductor.save(broken, tmp_path)
    assert not list(tmp_path.iterdir())
