"""The operators of a graph that move elements and compute nothing, by what they do. Each pass joins the groups that its proof allows.

``_torch/order.py`` has :data:`RESHAPES` of its own, because it imports nothing of this package; ``tensors/base.py`` and ``moe/read.py`` have a rule for each
operator instead of a table.
"""

from __future__ import annotations

import operator

import torch

aten = torch.ops.aten
RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}  # the same elements in the same order, in another shape
UNITS = {aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}  # dimensions of size 1, named by the call, come or go
SAME = {aten.alias.default, aten.detach.default}  # the same tensor under another name
TURNS = {aten.permute.default, aten.transpose.int, aten.t.default}  # the same dimensions in another order
PARTS = {aten.slice.Tensor, aten.select.int}  # some of the elements
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, operator.getitem}  # several parts, and one of several
