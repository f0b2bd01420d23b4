"""Triton's interpreter, switched on and made quicker. Import this before anything imports Triton, in a process of its own (own_process.py).

The interpreter replaces the language's functions again in every call of a device function, by far most of its time; here once a launch. Of what is left, most
is types: what two operands become is found anew for every operation, and blocks of a few shapes are described each time; here once a process. Operands are
not copied to the shape of the result, which NumPy finds by the same rule. The interpreter also computes in 64 bits whether integers overflow, for an
assertion that it then leaves out (``device_assert`` without ``debug``), and casts and broadcasts what has the type and shape already.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def _patch_once_a_launch() -> None:
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    @functools.cache
    def languages(fn) -> frozenset[str]:
        """What ``patch`` replaces functions of, by the names under which ``fn`` sees it."""
        return frozenset(module.__name__ for module in (tl, tl.core) if any(value is module for value in fn.__globals__.values()))

    def patch_once(fn):
        if patched and languages(fn) <= patched:
            return None  # of a device function: nobody reads it
        patched.update(languages(fn))
        return patch(fn)

    def launch_afresh(self, *args, **kwargs):
        patched.clear()  # a launch takes back at its end what it replaced
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_afresh


def _call_directly() -> None:
    """A function of the language without the wrapper that asks whether it is called from a kernel."""
    semantic = interpreter.interpreter_semantic

    @functools.cache
    def direct(member):
        inner = getattr(member, "__wrapped__", member)

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        return call

    unwrap = tl.core._unwrap_if_constexpr

    def unwrap_known(o):
        kind = type(o)
        return o if kind is tl.tensor or kind is int or kind is float else o.value if kind is tl.constexpr else unwrap(o)

    def operator(name, swapped):
        operation = functools.partial(getattr(TritonSemantic, name), semantic)
        more = (True,) if name in ("add", "sub", "mul") else ()
        if swapped:
            return lambda self, other, _semantic=None: operation(unwrap_known(other), self, *more)
        return lambda self, other, _semantic=None: operation(self, unwrap_known(other), *more)

    operators = {f"__{name}__": operator(name, False) for name in ("add", "sub", "mul")}
    operators |= {f"__r{name}__": operator(name, True) for name in ("add", "sub", "mul")}
    operators |= {f"__{name.strip('_')}__": operator(name, False) for name in ("truediv", "floordiv", "mod", "and_", "or_", "xor_")}
    compared = dict(lt="less_than", le="less_equal", gt="greater_than", ge="greater_equal", eq="equal", ne="not_equal")
    operators |= {f"__{name}__": operator(of, False) for name, of in compared.items()}

    index, indexed = tl.tensor.__getitem__.__wrapped__, {}

    def index_once(self, slices, _semantic=None):
        """With None and whole slices alone, as NumPy does it."""
        known = type(slices) is tuple and self.type.is_block() and all(s is None or (type(s) is slice and s == slice(None)) for s in slices)
        key = known and (id(self.type), *(s is None for s in slices))
        if key not in indexed:
            found = index(self, slices, _semantic=semantic)
            if known:
                indexed[key] = found.type
            return found
        return tl.tensor(interpreter.TensorHandle(self.handle.data[slices], self.handle.dtype.scalar), indexed[key])

    operators["__getitem__"] = index_once

    def patch(obj, name, member, builder, scope):
        scope.set_attr(obj, name, operators[name] if obj is tl.tensor and name in operators else direct(member))

    interpreter._patch_attr, tl.core._unwrap_if_constexpr = patch, unwrap_known


def _describe_once() -> None:
    describe, block, np_dtype = tl.tensor.__init__, tl.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[tuple, tl.block_type] = {}
    shapes: dict[tuple, tuple] = {}
    np_dtypes: dict[str, object] = {}
    sizes: dict[int, tuple] = {}

    def one_block(cls, element_ty, shape):
        """The same object for the same elements and shape, so that other tables can have it by its identity."""
        key = id(element_ty), *(s.value if isinstance(s, tl.constexpr) else s for s in shape)
        if key not in blocks:
            made = object.__new__(cls)
            block(made, element_ty, shape)
            made.shape = shapes.setdefault(made.shape, made.shape)
            blocks[key] = made
        return blocks[key]

    def describe_once(self, handle, type):
        known = type.__dict__.get("of_tensors")
        if known is None:
            describe(self, handle, type)
            known = type.of_tensors = self.numel, self.shape, self.dtype
        self.handle, self.type = handle, type
        self.numel, self.shape, self.dtype = known

    def np_dtype_once(tt_dtype):
        key = tt_dtype.scalar.name
        if key not in np_dtypes:
            np_dtypes[key] = np_dtype(tt_dtype)
        return np_dtypes[key]

    def handle(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if id(dtype) not in sizes:
            sizes[id(dtype)] = dtype, 8 if isinstance(dtype, tl.pointer_type) else max(1, dtype.primitive_bitwidth // 8)
        if data.itemsize > sizes[id(dtype)][1]:
            self.__post_init__()

    tl.block_type.__new__, tl.block_type.__init__ = one_block, lambda self, element_ty, shape: None
    tl.tensor.__init__, interpreter._get_np_dtype, interpreter.TensorHandle.__init__ = describe_once, np_dtype_once, handle


def _plan_once() -> None:
    """What the operands of an elementwise operation are cast and broadcast to, by their types."""
    plan = TritonSemantic.binary_op_type_checking_impl
    plans: dict[tuple, tuple] = {}
    constants: dict[tuple, tl.tensor] = {}
    of_types: dict[int, tl.dtype] = {}  # no other object gets their identity

    def kind_of(self, x):
        """Of a tensor its type, of a number what it becomes; None: ask. Types by their identity: to compare their names takes longer."""
        if type(x) is tl.tensor:
            of_types.setdefault(id(x.type), x.type)
            return id(x.type)
        return (type(x), self.to_tensor_type(x).name) if type(x) in (bool, int, float) else None

    def constant(self, value, dtype):
        key = type(value), value, math.copysign(1, value), dtype.name
        if key not in constants:
            constants[key] = self._cast_to_computation_type(value, dtype)
        return constants[key]

    def given_as(self, x, to):
        if type(x) is not tl.tensor:
            x = constant(self, x, to.scalar)
        elif x.dtype is not to.scalar:
            x = self.cast(x, to.scalar)
        return x if x.type is to else tl.tensor(x.handle, to)

    def planned(self, lhs, rhs, *how, **more):
        left, right = kind_of(self, lhs), kind_of(self, rhs)
        if left is None or right is None:
            return plan(self, lhs, rhs, *how, **more)
        key = left, right, how, *more.items()
        if key not in plans:
            found = plan(self, lhs, rhs, *how, **more)
            plans[key] = tuple(x.type for x in found)
            return found
        left, right = plans[key]
        return given_as(self, lhs, left), given_as(self, rhs, right)

    TritonSemantic.binary_op_type_checking_impl = planned


def _leave_out_what_changes_nothing() -> None:
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    cast, broadcast = TritonSemantic.cast, TritonSemantic.broadcast_impl_value

    convert, converted, casts = builder.cast_impl, [], {}

    def recorded(src, dst_type):
        converted.append(src)
        return convert(src, dst_type)

    def cast_to_another(self, input, dst_ty, *args, **kwargs):
        """What was one conversion of NumPy's is that alone from then on."""
        if input.dtype is dst_ty:
            return input
        key = id(input.type), id(dst_ty), args, *kwargs.items()
        if key not in casts:
            converted.clear()
            found = cast(self, input, dst_ty, *args, **kwargs)
            once = len(converted) == 1 and converted[0] is input.handle
            casts[key] = (found.type if once else None), input.type, dst_ty  # no other object gets the identity of these two
            return found
        to = casts[key][0]
        return cast(self, input, dst_ty, *args, **kwargs) if to is None else tl.tensor(convert(input.handle, to), to)

    def broadcast_to_another(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        same = a.is_block() and b.is_block() and a.shape is b.shape  # blocks that are described once have one shape
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    builder.cast_impl = recorded
    TritonSemantic.cast, TritonSemantic.broadcast_impl_value = cast_to_another, broadcast_to_another


gc.disable()  # no cycles are made; it would search the modules of torch again and again
_patch_once_a_launch()
_describe_once()
_leave_out_what_changes_nothing()
_plan_once()
_call_directly()
