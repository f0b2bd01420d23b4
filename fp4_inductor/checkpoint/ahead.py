"""Read a few items ahead of the one being used, in threads: files are read and checked while tensors move to their device."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
THREADS = min(8, os.cpu_count() or 1)  # checksums take one for each 1.5 GB/s
LIMIT = 1 << 30  # bytes read and not yet used


def ahead(items: Iterable[Item], read: Callable[[Item], Result], size: Callable[[Item], int]) -> Iterator[tuple[Item, Result]]:
    """``(item, read(item))`` in order. At most 1 GB, or one item if that is larger, waits to be used; nothing else refers to a result."""
    waiting: deque[tuple[Item, int, Future[Result]]] = deque()
    pool = ThreadPoolExecutor(THREADS)
    todo, held = deque(items), 0
    try:
        while todo or waiting:
            while todo and (not waiting or held + size(todo[0]) <= LIMIT):
                item = todo.popleft()
                held += size(item)
                waiting.append((item, size(item), pool.submit(read, item)))
            item, bytes_, future = waiting.popleft()
            held -= bytes_
            yield item, future.result()
            del future
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
