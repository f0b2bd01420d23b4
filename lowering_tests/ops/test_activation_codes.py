"""The numbers of activations: one enum, from which the CUDA header is written, and which names what the ops accept."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from fp4_inductor import errors
from fp4_inductor.kernels.forms import Epilogue
from fp4_inductor.ops import activation, linear_glu
from fp4_inductor.ops.activation import ActivationCode, activation_code

ROOT = Path(__file__).resolve().parents[2]


def test_the_cuda_header_is_the_one_that_the_generator_writes():
    """``make activations`` writes it."""
    spec = importlib.util.spec_from_file_location("write_activations", ROOT / ".ci" / "activations.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.HEADER.read_text() == script.text()


def test_the_numbers_are_those_of_graphs_compiled_earlier():
    """Generated code and AOTInductor packages hold them, so no number may change."""
    assert {code.name: int(code) for code in ActivationCode} == {"NONE": 0, "SILU": 1, "GELU": 2, "GELU_TANH": 3, "RELU": 4}


def test_every_activation_of_the_ops_has_a_number_whatever_their_order():
    assert {activation_code(name) for name in linear_glu.ACTIVATIONS} == {int(code) for code in ActivationCode} - {0}
    assert activation_code("") == 0
    assert all(type(activation_code(name)) is int for name in linear_glu.ACTIVATIONS)  # as generated code prints it
    assert set(linear_glu.ACTIVATIONS) < set(activation.ACTIVATIONS)


def test_cuda_computes_what_the_names_say():
    """Each name of the header is a case of activate() in epilogue.cuh, and there is no other."""
    source = (ROOT / "csrc" / "common" / "epilogue.cuh").read_text()
    cases = re.findall(r"case (k\w+):", source[source.index("float activate(") :].partition("\n}\n")[0])
    assert cases == [f"k{code.name.title().replace('_', '')}" for code in ActivationCode][1:]


def test_the_operator_gets_the_number():
    assert Epilogue(act="gelu_tanh").arguments() == (0, 0, 3)
    assert Epilogue().arguments() == ()


def test_an_unknown_one():
    with pytest.raises(errors.ConfigError, match="no kernel applies this activation") as error:
        activation_code("relu2")
    assert error.value.value == "'relu2'" and error.value.limit == ["", "silu", "gelu", "gelu_tanh", "relu"]
