"""The choice on sm_100 to sm_129: Blackwell. As on sm_80 to sm_89, but for the Triton GEMV, which serves up to four rows there."""

from __future__ import annotations

from .common import many_rows
from .sm80 import few_rows


def linear(call, can):
    yield from few_rows(call, can, gemv=4, mid=64)
    yield from many_rows(call, can)
