"""Every model type of the installed Transformers against the default call of ``quantize_model``, on the meta device.

    python -m lowering_tests.models.model_types [--json FILE] [--write] [TYPE ...]

prints one line a type and the counts (about four minutes on one core). ``--write`` puts them into docs/model_types.md, which
test_model_types.py holds to what the installed Transformers gives. A type is judged
by the model that a user would load: with a generating head where there is one, else the base model; where that has no linear
layer (the trunk of a convolutional network), by the first of its other heads that has one. A model has its default size but
six layers, so a share of a single layer is larger than in the real model.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import inspect
import json
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fp4_inductor.errors import FP4Error
from fp4_inductor.models.plan import make_plan
from fp4_inductor.models.preflight import nothing_to_quantize, preflight, uncovered_share

LAYERS = 6
_GENERATING = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM")
_LAYER_COUNTS = {
    *("num_hidden_layers", "num_layers", "n_layers", "n_layer", "encoder_layers", "decoder_layers"),
    *("num_encoder_layers", "num_decoder_layers", "depth"),
}
_LAYER_LISTS = {"layer_types", "mlp_layer_types", "layers_block_type", "block_types"}
# What a default configuration leaves open and its model needs.
OPTIONS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 24},
    "informer": {"prediction_length": 24},
    "time_series_transformer": {"prediction_length": 24},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}


@dataclass
class Verdict:
    """What became of one model type.

    Args:
        status: ``"taken"``, ``"left"`` (taken, and some weights stay with a reason), ``"empty"`` (refused: no linear layer in any of its
            models), ``"refused"``, or ``"not built"`` (no model class, a missing library, a default configuration that its own model refuses).
        model: the class that was judged.
        share: of the linear and expert weights that stay in high precision.
        reasons: the reasons of those weights, or why it was refused or not built.
    """

    status: str
    model: str = ""
    share: float = 0.0
    reasons: list[str] = field(default_factory=list)


def judged(model: torch.nn.Module) -> Verdict:
    """The verdict of the default call on a model on the meta device."""
    plan = make_plan(model, with_stacks=True)
    name, share = type(model).__name__, uncovered_share(plan)
    reasons = list(dict.fromkeys(s.reason for s in plan.uncovered))
    try:
        preflight(plan, None)
    except FP4Error as error:
        problems = [p for p in getattr(error, "problems", [error]) if "is on the meta device" not in str(p)]
        if problems:
            return Verdict("refused", name, share, reasons or [str(p).splitlines()[0] for p in problems])
    if not (plan.groups or plan.experts or plan.stacks):
        error = nothing_to_quantize(plan, model, None, False)
        return Verdict("refused", name, share, reasons) if plan.uncovered else Verdict("empty", name, share, [str(error).splitlines()[0]])
    return Verdict("left" if plan.uncovered else "taken", name, share, reasons)


def verdict(model_type: str) -> Verdict:
    """The verdict on one key of ``CONFIG_MAPPING``."""
    config_class = CONFIG_MAPPING[model_type]
    failed, found = ["no model class"], Verdict("not built")
    for cls in _classes(model_type, config_class):
        try:
            model = _built(cls, config_class, OPTIONS.get(model_type, {}))
        except Exception as error:  # of any kind: it is the model that does not build, and the verdict says so
            failed.append(f"{cls.__name__}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
            continue
        new = judged(model)
        if found.status == "not built" or (found.status == "empty" and new.status != "empty"):
            found = new
        if found.status != "empty":
            break
    return found if found.status != "not built" else Verdict("not built", "", 0.0, failed[-1:])


def _classes(model_type: str, config_class: type) -> Iterator[type]:
    names = [f"MODEL_FOR_{n}_MAPPING" for n in _GENERATING] + ["MODEL_MAPPING"]
    names += sorted(n for n in dir(modeling_auto) if n.startswith("MODEL_FOR") and n.endswith("_MAPPING") and n not in names)
    seen: dict[type, None] = {}
    for name in names:
        with contextlib.suppress(Exception):  # a class that needs a library which is not installed
            listed = getattr(modeling_auto, name).get(config_class, ())
            seen |= dict.fromkeys(listed if isinstance(listed, (tuple, list)) else (listed,))
    if not seen:  # a part of a larger model: it has no auto class, but a class of its own
        with contextlib.suppress(Exception):
            module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
            own = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, transformers.PreTrainedModel)]
            seen = dict.fromkeys(c for c in own if getattr(c, "config_class", None) is config_class and not c.__name__.endswith("PreTrainedModel"))
    return iter(seen)


def first_model(config: Any) -> torch.nn.Module:
    """A model of the first of the classes by which ``config`` is judged, with its weights."""
    return next(_classes(config.model_type, type(config)))._from_config(config)  # type: ignore[attr-defined]


def _built(cls: Any, config_class: type, options: dict[str, Any]) -> torch.nn.Module:
    for small in (True, False):
        config = config_class(**options)
        if small:
            _shrink(config, set())
        try:
            with torch.device("meta"):
                return cls._from_config(config)
        except Exception:
            if not small:
                raise
    raise RuntimeError("not reached: the second attempt returns or raises")


def _shrink(config: Any, seen: set[int]) -> None:
    if id(config) in seen:
        return
    seen.add(id(config))
    for key, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            _shrink(value, seen)
        elif (key in _LAYER_COUNTS and type(value) is int and value > LAYERS) or (key in _LAYER_LISTS and isinstance(value, list)):
            with contextlib.suppress(Exception):
                setattr(config, key, value[:LAYERS] if isinstance(value, list) else LAYERS)


# --- the page -----------------------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "model_types.md"
BEGIN, END = "<!-- model types: begin (python -m lowering_tests.models.model_types --write) -->", "<!-- model types: end -->"
# status -> heading of its table, and what the table says.
_TABLES = {
    "refused": ("Refused", "`quantize_model(model)` raises a `CoverageError`; `strict=False` quantizes the rest."),
    "left": ("Taken, a small share stays", "These weights stay in high precision; `strict=True` refuses them."),
    "empty": (
        "No linear layer",
        "Convolutions from end to end, or nothing but an output head besides: a `ConfigError` says that there is nothing to quantize.",
    ),
    "not built": ("Not judged", "The default configuration builds no model in an environment with Transformers alone."),
}
_ROW = re.compile(r"^\| `([^`]+)` \| ([^|]*) \| ([\d.]+) % \| ([^|]*) \|$", re.MULTILINE)


def by_auto_model() -> set[str]:
    """The types of which ``AutoModel.from_config`` makes a model."""
    return set(modeling_auto.MODEL_MAPPING_NAMES)


def counts(found: dict[str, Verdict]) -> list[tuple[str, int, int]]:
    """``(what, of all types, of those of AutoModel)``."""
    auto = by_auto_model()

    def number(*statuses: str) -> tuple[int, int]:
        names = [n for n, v in found.items() if v.status in statuses]
        return len(names), sum(n in auto for n in names)

    lines = {"built": ("taken", "left", "empty", "refused"), "taken": ("taken", "left"), "refused": ("refused",), "without a linear layer": ("empty",)}
    return [(what, *number(*statuses)) for what, statuses in lines.items()]


def block(found: dict[str, Verdict]) -> str:
    """The generated part of the page."""
    lines = [BEGIN, f"Transformers {transformers.__version__}, `quantize_model(model)` without options:", ""]
    lines += ["| model types | all | known to `AutoModel` |", "|---|---|---|", *(f"| {what} | {n} | {auto} |" for what, n, auto in counts(found))]
    for status, (heading, text) in _TABLES.items():
        rows = {n: v for n, v in found.items() if v.status == status}
        lines += ["", f"## {heading}", "", text, ""]
        if status in ("refused", "left"):
            lines += ["| model type | judged by | stays | why |", "|---|---|---|---|"]
            lines += [f"| `{n}` | {v.model} | {100 * v.share:.1f} % | {'; '.join(v.reasons)} |" for n, v in rows.items()]
        else:
            groups: dict[str, list[str]] = {}
            for n, v in rows.items():
                groups.setdefault("" if status == "empty" else _why_not_built(v.reasons), []).append(f"`{n}`")
            lines += [_wrapped(f"{f'- {why}: ' if why else ''}{', '.join(names)}") for why, names in sorted(groups.items())]
    return "\n".join([*lines, END])


def _wrapped(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _why_not_built(reasons: list[str]) -> str:
    needed = re.search(r"requires the (\w+) library", "; ".join(reasons))
    if needed:
        return f"needs {needed[1]}"
    return (
        "a part of a larger model, without a class of its own" if reasons == ["no model class"] else "the default configuration is not one that its model takes"
    )


def listed() -> dict[str, Verdict]:
    """What the page says of the types that are refused or taken in part: shares rounded, reasons as one."""
    text = PAGE.read_text()
    found = {}
    for status in ("refused", "left"):
        section = text.split(f"## {_TABLES[status][0]}\n")[1].split("\n## ")[0]
        found |= {name: Verdict(status, model, float(share) / 100, [why]) for name, model, share, why in _ROW.findall(section)}
    return found


def listed_empty() -> list[str]:
    """The types that the page calls models without a linear layer."""
    section = PAGE.read_text().split(f"## {_TABLES['empty'][0]}\n")[1].split("\n## ")[0]
    return re.findall(r"`([\w-]+)`", section.replace(_TABLES["empty"][1], ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="also write the verdicts to this file")
    parser.add_argument("--write", action="store_true", help=f"write the counts and lists into {PAGE.relative_to(PAGE.parents[1])}; of all types only")
    parser.add_argument("types", nargs="*", help="model types; all of them by default")
    arguments = parser.parse_args()
    if arguments.write and arguments.types:
        parser.error("--write needs the verdicts on all types")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = {}
    for name in arguments.types or sorted(CONFIG_MAPPING.keys()):
        found[name] = v = verdict(name)
        print(f"{name:36s} {v.status:10s} {v.model:44s} {100 * v.share:6.2f} %  {'; '.join(v.reasons)[:160]}", flush=True)
        gc.collect()
    print(f"\nTransformers {transformers.__version__}: all types, those known to AutoModel")
    for what, n, auto in counts(found):
        print(f"{what:24s} {n:5d} {auto:5d}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({n: asdict(v) for n, v in found.items()}, file, indent=1)
    if arguments.write:
        text = PAGE.read_text()
        PAGE.write_text(f"{text.split(BEGIN)[0]}{block(found)}{text.split(END)[1]}")


if __name__ == "__main__":
    main()
