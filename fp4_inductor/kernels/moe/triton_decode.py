"""An MoE layer for a few tokens: two launches, no sorting, no atomics.

The first kernel computes the gate and up products and the activation: a program has BLOCK_N outputs of one (token, expert) assignment, and all of K. The second
computes the down products: a program has BLOCK_N outputs of a token, and sums GROUPS of its experts at a time, in a fixed order. For an assignment whose id is no
expert nothing is loaded and nothing is added.

A thread holds 32 k of a row at a time, which are called a *lane*: 16 bytes of dense codes or 8 of kept ones, two scales, and the lane's activations in half
precision for all of its rows. So no value goes through shared memory or a barrier between its load and its product. That holds as long as a step has as many
lanes as the program has threads (``configs.DecodeConfig``), and the compiler distributes lanes before rows (FIRST: ``configs.lanes_first``).

The first kernel converts activations itself. It writes ``h`` in the order in which the second kernel reads it: float16, each block of 16 divided by a power of two,
elements in the order of the decode, and the same eight of all lanes of a step side by side.

PDL (programmatic dependent launch, sm_90 and later): each of the two kernels may start while the kernel before it still runs. The first one waits for that kernel
before it does anything else. The second one requests its first weights, and then waits for the first one. It may read the ids before its wait, because it starts
when all programs of the first kernel have begun, and these had waited for the kernel that writes the ids.

The codes of 2:4-sparse experts are the kept ones: a word of 8 of them is 16 k, one block (:mod:`..sparse_linear.triton_sparse_gemv`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_lanes import add_lanes, lanes_of_h, lanes_of_x, load_lanes, load_x, normaliser, place_of_h


@triton.jit
def local_expert(IDS, MAP, at, MAP_SIZE, E, HAS_MAP: tl.constexpr):
    """The local expert of assignment ``at``, or -1: see ``ops.moe.local_ids``."""
    e = tl.load(IDS + at).to(tl.int64)
    if HAS_MAP:
        known = (e >= 0) & (e < MAP_SIZE)
        e = tl.load(MAP + e, mask=known, other=-1).to(tl.int64)
    return tl.where((e >= 0) & (e < E), e, -1)


@triton.jit
def activation(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr):
    """float32 ``act(gate) * up`` as ``ops.activation.Activation``; NaN passes through the clamps as in torch. LIMIT 0: none."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if ACT == "gelu":
        h = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # 0.5 (1 + tanh(u)) = sigmoid(2 u)
        u = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        h = gate / (1.0 + tl.exp(-u))
    elif ACT == "relu":
        h = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "relu2":
        h = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        h = h * h
    else:
        h = gate / (1.0 + tl.exp(-ALPHA * gate))
    if GATED:
        h = h * (up + 1.0) if ACT == "swiglu_oai" else h * up
    return h


@triton.jit(do_not_specialize=["TOP_K", "PAIRS", "E", "MAP_SIZE", "LENGTH", "LOG_L"])
def moe_decode_up(
    X, IDS, WEIGHTS, MAP, CODES, META, SCALE, GLOBAL_SCALE, BIAS, H, FACTOR, TOP_K, PAIRS, E, MAP_SIZE, LENGTH, LOG_L, INNER: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ON_INPUT: tl.constexpr, HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr, SPARSE: tl.constexpr, SPARSE_DOWN: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, FIRST: tl.constexpr,
    EVEN: tl.constexpr, CVT: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr, TWO: tl.constexpr = False
):  # fmt: skip
    """h = act(x[token] @ gate_up[expert].T + bias) of every assignment, as H (float16) times FACTOR (float32, one for 16 elements)."""
    if PDL:  # the wait comes first: when this kernel goes on, what came before is complete for the second kernel, too
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    words = CODES.to(tl.pointer_type(tl.int32), bitcast=True)
    metas = META.to(tl.pointer_type(tl.int16), bitcast=True) if SPARSE else words  # one 16-bit word for each word of kept codes
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    MASKED: tl.constexpr = K % BLOCK_K != 0 or not UNROLL
    PARTS: tl.constexpr = 2 if GATED else 1
    # One grid axis: the others end at 65535. Pairs run fastest, so that those of one expert read its rows at the same time.
    pair = (tl.program_id(0) % PAIRS).to(tl.int64)
    first = (tl.program_id(0) // PAIRS).to(tl.int64) * BLOCK_N
    rn = first + tl.arange(0, BLOCK_N)
    e = local_expert(IDS, MAP, pair, MAP_SIZE, E, HAS_MAP)
    token = tl.zeros((GROUPS,), tl.int64) + pair // TOP_K
    every = tl.full((GROUPS,), True, tl.int1)
    x = load_x(X, token, every, 0, K, BLOCK_K, MASKED, FIRST)  # on its way while the id arrives
    if e >= 0:
        # Gate and up of an output side by side. What differs between threads is in ``start``: the rest of an address is a constant to them.
        EACH: tl.constexpr = BLOCK_N // GROUPS
        row = tl.arange(0, EACH * PARTS).to(tl.int64)
        near = row if INTERLEAVED else row // PARTS + row % PARTS * INNER
        group = first + tl.arange(0, GROUPS).to(tl.int64) * EACH
        start = e * (PARTS * INNER) + group * (PARTS if INTERLEAVED else 1)
        if EVEN:
            ok = tl.full((GROUPS, EACH * PARTS), True, tl.int1)
        else:
            ok = group[:, None] + (row // PARTS)[None, :] < INNER
        LANES: tl.constexpr = BLOCK_K // 32
        acc = tl.zeros((LANES, GROUPS, EACH * PARTS) if FIRST else (EACH * PARTS, GROUPS, LANES), tl.float32)
        w, m, s = load_lanes(words, metas, scales, start, near, ok, 0, K, BLOCK_K, MASKED, SPARSE, FIRST)
        if UNROLL:
            for i in tl.static_range(STEPS):
                h, factor = lanes_of_x(x, SPARSE, CVT, ASM)
                if i + 1 < STEPS:
                    x = load_x(X, token, every, (i + 1) * BLOCK_K, K, BLOCK_K, MASKED, FIRST)
                    wn, mn, sn = load_lanes(words, metas, scales, start, near, ok, (i + 1) * BLOCK_K, K, BLOCK_K, MASKED, SPARSE, FIRST)
                acc = add_lanes(acc, w, m, s, h, factor, FIRST, SPARSE, CVT, ASM)
                if i + 1 < STEPS:
                    w, m, s = wn, mn, sn
        else:
            for i in range(STEPS):
                wn, mn, sn = load_lanes(words, metas, scales, start, near, ok, (i + 1) * BLOCK_K, K, BLOCK_K, MASKED, SPARSE, FIRST)
                h, factor = lanes_of_x(x, SPARSE, CVT, ASM)
                x = load_x(X, token, every, (i + 1) * BLOCK_K, K, BLOCK_K, MASKED, FIRST)
                acc = add_lanes(acc, w, m, s, h, factor, FIRST, SPARSE, CVT, ASM)
                w, m, s = wn, mn, sn
        z = tl.sum(acc, 0) if FIRST else tl.trans(tl.sum(acc, 2))
        if TWO:  # of gate and of up, which lie side by side
            scale = tl.load(GLOBAL_SCALE + e * 2 + row % 2)[None, :]
        else:
            scale = tl.load(GLOBAL_SCALE + e)
        if ON_INPUT:
            scale = scale * tl.load(WEIGHTS + pair).to(tl.float32)
        z = z * scale
        if HAS_BIAS:
            z += tl.load(BIAS + start[:, None] + near[None, :], mask=ok, other=0.0).to(tl.float32)
        if GATED:
            gate, up = tl.split(tl.reshape(z, (BLOCK_N, 2)))
        else:
            gate = tl.reshape(z, (BLOCK_N,))
            up = gate
        h = tl.where(rn < INNER, activation(gate, up, ALPHA, LIMIT, ACT, GATED), 0.0)
        h = tl.reshape(h, (BLOCK_N // 16, 16))
        grow, shrink = normaliser(tl.max(tl.abs(h), 1))
        h = tl.reshape(h * grow[:, None], (BLOCK_N,))
        if not CVT:
            h *= 256.0
        tl.store(H + pair * LENGTH + place_of_h(rn, LOG_L, SPARSE_DOWN, CVT), h.to(tl.float16), mask=rn < INNER)
        block = first // 16 + tl.arange(0, BLOCK_N // 16)
        tl.store(FACTOR + pair * (INNER // 16) + block, shrink, mask=block < INNER // 16)


@triton.jit(do_not_specialize=["T", "E", "MAP_SIZE"])
def moe_decode_down(
    H, FACTOR, IDS, WEIGHTS, MAP, CODES, META, SCALE, GLOBAL_SCALE, BIAS, Y, T, E, MAP_SIZE, N, TOP_K: tl.constexpr, ON_INPUT: tl.constexpr, HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    SPARSE: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, FIRST: tl.constexpr, EVEN: tl.constexpr, CVT: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Y[token, n] = sum over the token's experts of weight * (h @ down[expert].T + bias)"""
    words = CODES.to(tl.pointer_type(tl.int32), bitcast=True)
    metas = META.to(tl.pointer_type(tl.int16), bitcast=True) if SPARSE else words  # one 16-bit word for each word of kept codes
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
    halves = H.to(tl.pointer_type(tl.int32), bitcast=True)
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    MASKED: tl.constexpr = K % BLOCK_K != 0
    token = (tl.program_id(0) % T).to(tl.int64)  # fastest: see moe_decode_up
    first = (tl.program_id(0) // T).to(tl.int64) * BLOCK_N
    rn = first + tl.arange(0, BLOCK_N)
    near = tl.arange(0, BLOCK_N).to(tl.int64)
    ALL: tl.constexpr = (TOP_K + GROUPS - 1) // GROUPS * STEPS  # steps through K of each group of experts
    LANES: tl.constexpr = BLOCK_K // 32
    acc = tl.zeros((LANES, GROUPS, BLOCK_N) if FIRST else (BLOCK_N, GROUPS, LANES), tl.float32)
    if HAS_BIAS:
        bias = tl.zeros((GROUPS, BLOCK_N), tl.float32)
    pair, e, valid, start, ok = experts_of(IDS, MAP, token, 0, first, rn, E, MAP_SIZE, N, EVEN, TOP_K, HAS_MAP, GROUPS)
    w, m, s = load_lanes(words, metas, scales, start, near, ok, 0, K, BLOCK_K, MASKED, SPARSE, FIRST)
    share = share_of(WEIGHTS, GLOBAL_SCALE, pair, e, valid, ON_INPUT)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if UNROLL and ALL <= 16:
        for i in tl.static_range(ALL):
            h, factor = lanes_of_h(halves, FACTOR, pair, share, valid, i % STEPS * BLOCK_K, K, BLOCK_K, MASKED, FIRST)
            if HAS_BIAS and i % STEPS == 0:
                bias += biases_of(BIAS, WEIGHTS, pair, start[:, None] + near[None, :], valid, ok, ON_INPUT)
            if i + 1 < ALL:
                if (i + 1) % STEPS == 0:
                    pair, e, valid, start, ok = experts_of(IDS, MAP, token, (i + 1) // STEPS * GROUPS, first, rn, E, MAP_SIZE, N, EVEN, TOP_K, HAS_MAP, GROUPS)
                    share = share_of(WEIGHTS, GLOBAL_SCALE, pair, e, valid, ON_INPUT)
                wn, mn, sn = load_lanes(words, metas, scales, start, near, ok, (i + 1) % STEPS * BLOCK_K, K, BLOCK_K, MASKED, SPARSE, FIRST)
            acc = add_lanes(acc, w, m, s, h, factor, FIRST, SPARSE, CVT, ASM)
            if i + 1 < ALL:
                w, m, s = wn, mn, sn
    else:
        for i in range(ALL):
            h, factor = lanes_of_h(halves, FACTOR, pair, share, valid, i % STEPS * BLOCK_K, K, BLOCK_K, MASKED, FIRST)
            if HAS_BIAS:
                bias += biases_of(BIAS, WEIGHTS, pair, start[:, None] + near[None, :], valid, ok & (i % STEPS == 0), ON_INPUT)
            pair, e, valid, start, ok = experts_of(IDS, MAP, token, (i + 1) // STEPS * GROUPS, first, rn, E, MAP_SIZE, N, EVEN, TOP_K, HAS_MAP, GROUPS)
            share = share_of(WEIGHTS, GLOBAL_SCALE, pair, e, valid, ON_INPUT)
            wn, mn, sn = load_lanes(words, metas, scales, start, near, ok, (i + 1) % STEPS * BLOCK_K, K, BLOCK_K, MASKED, SPARSE, FIRST)
            acc = add_lanes(acc, w, m, s, h, factor, FIRST, SPARSE, CVT, ASM)
            w, m, s = wn, mn, sn
    y = tl.sum(acc, 0) if FIRST else tl.trans(tl.sum(acc, 2))
    if HAS_BIAS:
        y += bias
    tl.store(Y + token * N + rn, tl.sum(y, 0).to(Y.dtype.element_ty), mask=rn < N)


@triton.jit
def experts_of(IDS, MAP, token, begin, first, rn, E, MAP_SIZE, N, EVEN: tl.constexpr, TOP_K: tl.constexpr, HAS_MAP: tl.constexpr, GROUPS: tl.constexpr):
    """Of a token's choices ``begin .. begin + GROUPS``: pairs, experts, whether there is one, the first of the program's rows of each, which rows to load."""
    choice = begin + tl.arange(0, GROUPS)
    pair = token * TOP_K + choice
    e = tl.load(IDS + pair, mask=choice < TOP_K, other=-1).to(tl.int64)
    if HAS_MAP:
        known = (e >= 0) & (e < MAP_SIZE)
        e = tl.load(MAP + e, mask=known, other=-1).to(tl.int64)
    valid = (e >= 0) & (e < E)
    e = tl.where(valid, e, 0)
    ok = tl.broadcast_to(valid[:, None], (GROUPS, rn.shape[0])) if EVEN else valid[:, None] & (rn < N)[None, :]
    return pair, e, valid, e * N + first, ok


@triton.jit
def share_of(WEIGHTS, GLOBAL_SCALE, pair, e, valid, ON_INPUT: tl.constexpr):
    share = tl.load(GLOBAL_SCALE + e, mask=valid, other=0.0)
    if not ON_INPUT:
        share = share * tl.load(WEIGHTS + pair, mask=valid, other=0.0).to(tl.float32)
    return share


@triton.jit
def biases_of(BIAS, WEIGHTS, pair, rows, valid, ok, ON_INPUT: tl.constexpr):
    bias = tl.load(BIAS + rows, mask=ok, other=0.0).to(tl.float32)
    if not ON_INPUT:
        bias = bias * tl.load(WEIGHTS + pair, mask=valid, other=0.0).to(tl.float32)[:, None]
    return bias
