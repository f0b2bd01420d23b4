"""dispatch() and set_dispatch(): what is in force where, in blocks, threads and tasks."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading

import pytest

from fp4_inductor import DispatchConfig, dispatch, set_dispatch
from fp4_inductor.config import dispatch_config
from fp4_inductor.errors import ConfigError


@pytest.fixture(autouse=True)
def _defaults():
    before = set_dispatch()
    yield
    set_dispatch(before)


def in_a_thread(ask):
    """What ``ask()`` returns in another thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    return found[0]


def test_set_dispatch_is_for_every_thread_and_returns_what_was_before():
    before = set_dispatch(unproven="runtime")
    assert before == DispatchConfig()
    assert dispatch_config() == in_a_thread(dispatch_config) == DispatchConfig(unproven="runtime")
    assert set_dispatch(thresholds={"gemv": 1}) == DispatchConfig(unproven="runtime"), "one field at a time"
    assert dispatch_config() == DispatchConfig(unproven="runtime", thresholds={"gemv": 1})
    set_dispatch(before)
    assert dispatch_config() == DispatchConfig()


def test_a_bad_field_changes_nothing():
    with pytest.raises(ConfigError, match="unproven"):
        set_dispatch(unproven="fast")
    with pytest.raises(TypeError, match="speed"):
        set_dispatch(speed=1)
    with pytest.raises(ConfigError, match="got no DispatchConfig"):
        set_dispatch({"unproven": "runtime"})
    with pytest.raises(ConfigError, match="unproven"):
        dispatch(unproven="fast")
    assert dispatch_config() == DispatchConfig()


def test_a_block_counts_before_the_process():
    with dispatch(unproven="runtime"), dispatch(early="never"):
        assert dispatch_config() == DispatchConfig(unproven="runtime", early="never")
        set_dispatch(unproven="guard", thresholds={"gemv": 1})
        assert dispatch_config() == DispatchConfig(unproven="runtime", early="never", thresholds={"gemv": 1}), "the rest follows at once"
        assert in_a_thread(dispatch_config) == DispatchConfig(thresholds={"gemv": 1})
    assert dispatch_config() == DispatchConfig(thresholds={"gemv": 1})


def test_blocks_of_two_threads_that_overlap():
    """Each thread put back what it found: the first to end took the other's config away, the last left its own for good."""
    steps = [threading.Event() for _ in range(3)]
    found = {}

    def first():
        with dispatch(unproven="runtime"):
            steps[0].set()
            steps[1].wait()
        found["first, after"] = dispatch_config()
        steps[2].set()

    def second():
        steps[0].wait()
        with dispatch(early="never"):
            steps[1].set()
            steps[2].wait()
            found["second, inside"] = dispatch_config()
        found["second, after"] = dispatch_config()

    threads = [threading.Thread(target=f) for f in (first, second)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == {"first, after": DispatchConfig(), "second, inside": DispatchConfig(early="never"), "second, after": DispatchConfig()}
    assert dispatch_config() == DispatchConfig()


def test_blocks_of_two_tasks_that_overlap():
    async def task(pause, **fields):
        with dispatch(**fields):
            await asyncio.sleep(pause)
            return dispatch_config()

    async def both():
        return await asyncio.gather(task(0.02, unproven="runtime"), task(0.01, early="never"))

    assert asyncio.run(both()) == [DispatchConfig(unproven="runtime"), DispatchConfig(early="never")]


def test_a_block_that_is_entered_and_not_kept_stays():
    """As a generator it ended when it was collected, and the config with it."""
    context = contextvars.copy_context()

    def entered():
        dispatch(unproven="runtime").__enter__()
        gc.collect()
        return dispatch_config().unproven

    assert context.run(entered) == "runtime"
    assert dispatch_config().unproven == "guard"


def test_blocks_that_end_in_another_order():
    a, b = dispatch(unproven="runtime"), dispatch(early="never")
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    assert dispatch_config() == DispatchConfig(early="never")
    b.__exit__(None, None, None)
    assert dispatch_config() == DispatchConfig()
