"""compile_range(), range providers and cache_salt(): what is in force where, in blocks and threads."""

from __future__ import annotations

import contextvars
import gc
import subprocess
import sys

import pytest

import fp4_inductor
from fp4_inductor import DispatchConfig, add_range_provider, compile_range, dispatch, set_dispatch
from fp4_inductor.errors import ConfigError
from fp4_inductor.ranges import Range, range_in_force
from lowering_tests.test_dispatch import _defaults, in_a_thread  # noqa: F401  (a fixture)


def test_blocks_of_ranges_nest():
    assert range_in_force() is None
    with compile_range(1, 16) as outer:
        assert range_in_force() == outer == (1, 16)
        with compile_range(17):
            assert range_in_force() == Range(17, None)
        assert range_in_force() == (1, 16)
    assert range_in_force() is None


def test_a_range_ends_with_an_error():
    with pytest.raises(KeyError), compile_range(1, 16):
        raise KeyError
    assert range_in_force() is None


def test_a_range_is_a_decorator_and_can_be_used_again():
    few = compile_range(1, 4)

    @few
    def inside():
        with few:
            return range_in_force()

    assert inside() == inside() == (1, 4)
    assert range_in_force() is None


@pytest.mark.parametrize("given", [(5, 4), (-1, 4), (1.5, 4), ("1", 4), (None, 4)], ids=str)
def test_what_is_no_range_is_refused(given):
    with pytest.raises(ConfigError, match=r"no range of sizes; got .*; accepted: \(low, high\)"):
        compile_range(*given)


def test_a_range_belongs_to_its_thread():
    with compile_range(1, 16):
        assert in_a_thread(range_in_force) is None
        assert contextvars.copy_context().run(range_in_force) == (1, 16)


def test_providers_are_asked_in_order_and_a_block_counts_before_them():
    given: list = [None, (3, 4)]
    removes = [add_range_provider(lambda i=i: given[i]) for i in range(2)]
    try:
        assert range_in_force() == (3, 4)
        given[0] = (1, None)
        assert range_in_force() == (1, None)
        assert in_a_thread(range_in_force) == (1, None), "a provider is asked in every thread"
        with compile_range(7, 8):
            assert range_in_force() == (7, 8)
        removes[0]()
        assert range_in_force() == (3, 4)
    finally:
        for remove in removes:
            remove()
    assert range_in_force() is None


def test_a_provider_that_gives_something_else_is_named():
    def vllm_range():
        return 16

    remove = add_range_provider(vllm_range)
    try:
        with pytest.raises(ConfigError, match="range provider .*vllm_range gives no range of sizes; got 16"):
            range_in_force()
    finally:
        remove()
    with pytest.raises(ConfigError, match="not a function"):
        add_range_provider((1, 16))


def test_a_block_that_is_entered_and_not_kept_stays():
    context = contextvars.copy_context()

    def entered():
        compile_range(1, 16).__enter__()
        gc.collect()
        return range_in_force()

    assert context.run(entered) == (1, 16)
    assert range_in_force() is None


def test_the_salt():
    """Of sources, config and range; the same for the same."""
    plain = fp4_inductor.cache_salt()
    assert plain == in_a_thread(fp4_inductor.cache_salt)
    assert plain.isascii() and " " not in plain and len(plain) < 120
    with dispatch(unproven="runtime"):
        inside = fp4_inductor.cache_salt()
    with compile_range(1, 16):
        few = fp4_inductor.cache_salt()
    with compile_range(1):
        all_sizes = fp4_inductor.cache_salt()
    set_dispatch(unproven="runtime")
    assert fp4_inductor.cache_salt() == inside == in_a_thread(fp4_inductor.cache_salt)
    set_dispatch(early="never")
    assert len({plain, inside, few, all_sizes, fp4_inductor.cache_salt()}) == 5
    set_dispatch(DispatchConfig())
    assert fp4_inductor.cache_salt() == plain


def test_the_salt_needs_no_inductor():
    code = "import sys, fp4_inductor; fp4_inductor.cache_salt(); assert 'torch._inductor.compile_fx' not in sys.modules and 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
