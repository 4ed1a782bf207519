"""The fused kernels: each takes all tensors of a list in one launch.

A launch gets tables of addresses instead of tensors. Row ``t`` of ``pointers`` holds the addresses that belong to
tensor ``t``, row ``t`` of ``layout`` says how its elements map to blocks, and a row of ``tiles`` sends a program to a
tensor and to the place in it where its work starts.

Element ``m`` of a tensor, in the order of memory, belongs to block

    (m // row) * blocks_in_row + (m % row % inner) // length

and the elements of block ``k``, with ``q = k // blocks_in_row`` and ``c = k % blocks_in_row``, are

    q * row + c * length + stride * j,    0 <= j < min(count, row - c * length)
"""

# Triton reads annotations when it compiles: they must not be put off by a future import.

import triton
import triton.language as tl

# Columns of ``layout``.
NUMEL = tl.constexpr(0)
BLOCKS = tl.constexpr(1)
ROW = tl.constexpr(2)
BLOCKS_IN_ROW = tl.constexpr(3)
INNER = tl.constexpr(4)
LENGTH = tl.constexpr(5)
COUNT = tl.constexpr(6)
STRIDE = tl.constexpr(7)
WIDE = tl.constexpr(8)
SIGNED = tl.constexpr(9)
POSITION = tl.constexpr(10)
LAYOUT = tl.constexpr(11)

# Where blocks are whole rows of so many elements, ``wide`` says how many rows they have; elsewhere it is 0.
ROW_OF_LANES = tl.constexpr(32)

UNTOUCHED = tl.constexpr(-1.0)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FACTOR1 = tl.constexpr(0xBF58476D1CE4E5B9)
FACTOR2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def update(
    pointers,
    layout,
    tiles,
    scale,
    decay,
    weight,
    eps,
    power,
    sign,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Moments, weight decay and step, in one pass over memory. Pointers: parameter, gradient, momentum, Hessian rms."""
    tensor = tl.load(tiles + 2 * tl.program_id(0))
    start = tl.load(tiles + 2 * tl.program_id(0) + 1)
    layout += tensor * LAYOUT
    param = tl.load(pointers + 4 * tensor).to(tl.pointer_type(ELEMENT))
    grad = tl.load(pointers + 4 * tensor + 1).to(tl.pointer_type(ELEMENT))
    exp_avg = tl.load(pointers + 4 * tensor + 2).to(tl.pointer_type(ELEMENT))
    hessian_rms = tl.load(pointers + 4 * tensor + 3).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        param = tl.multiple_of(param, 16)
        grad = tl.multiple_of(grad, 16)
        exp_avg = tl.multiple_of(exp_avg, 16)
    left = tl.load(layout + NUMEL) - start
    # A tile starts at a multiple of its size: said so that whole tiles are read sixteen bytes at a time.
    start = tl.multiple_of(start, TILE)
    param += start
    grad += start
    exp_avg += start
    wide = tl.load(layout + WIDE)
    settings = (scale, decay, weight, eps, power, sign)
    if left < TILE:
        _update_some(param, grad, exp_avg, hessian_rms, layout, settings, start, left, ELEMENT, TILE)
    elif wide != 0:
        _update_rows(param, grad, exp_avg, hessian_rms, settings, start // ROW_OF_LANES, wide, ELEMENT, TILE)
    else:
        _update_all(param, grad, exp_avg, hessian_rms, layout, settings, start, ELEMENT, TILE)


@triton.jit
def _update_all(param, grad, exp_avg, hessian_rms, layout, settings, start, ELEMENT: tl.constexpr, TILE: tl.constexpr):
    """A whole tile."""
    lane = tl.arange(0, TILE)
    p = tl.load(param + lane).to(tl.float32)
    g = tl.load(grad + lane).to(tl.float32)
    m = tl.load(exp_avg + lane).to(tl.float32)
    d = tl.load(hessian_rms + _block_of(layout, start, lane))
    p, m = _step(p, g, m, _powered(d, settings), settings)
    tl.store(param + lane, p.to(ELEMENT))
    tl.store(exp_avg + lane, m.to(ELEMENT))


@triton.jit
def _update_rows(param, grad, exp_avg, hessian_rms, settings, first, wide, ELEMENT: tl.constexpr, TILE: tl.constexpr):
    """A whole tile in rows that each lie within a block: one value of the Hessian is read a row, not an element."""
    row = tl.arange(0, TILE // ROW_OF_LANES)
    lane = row[:, None] * ROW_OF_LANES + tl.arange(0, ROW_OF_LANES)[None, :]
    d = tl.load(hessian_rms + (first + row) // wide)
    p = tl.load(param + lane).to(tl.float32)
    g = tl.load(grad + lane).to(tl.float32)
    m = tl.load(exp_avg + lane).to(tl.float32)
    p, m = _step(p, g, m, _powered(d, settings)[:, None], settings)
    tl.store(param + lane, p.to(ELEMENT))
    tl.store(exp_avg + lane, m.to(ELEMENT))


@triton.jit
def _update_some(
    param, grad, exp_avg, hessian_rms, layout, settings, start, left, ELEMENT: tl.constexpr, TILE: tl.constexpr
):
    """The last tile of a tensor."""
    lane = tl.arange(0, TILE)
    inside = lane < left
    p = tl.load(param + lane, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + lane, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + lane, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(hessian_rms + _block_of(layout, start, lane), mask=inside, other=1.0)
    p, m = _step(p, g, m, _powered(d, settings), settings)
    tl.store(param + lane, p.to(ELEMENT), mask=inside)
    tl.store(exp_avg + lane, m.to(ELEMENT), mask=inside)


@triton.jit
def _powered(d, settings):
    """The denominator."""
    _, _, _, eps, power, _ = settings
    if power != 1.0:
        if power == 0.0:
            d = tl.full(d.shape, 1.0, tl.float32)
        else:
            d = tl.exp2(power * tl.log2(d))
    return d + eps


@triton.jit
def _step(p, g, m, v, settings):
    scale, decay, weight, _, _, sign = settings
    m += (g * sign - m) * weight
    return p * decay + scale * (m / v), m


@triton.jit
def _block_of(layout, start, lane):
    """The blocks of the elements ``start + lane``; the long division is done once, on the start."""
    row = tl.load(layout + ROW)
    blocks_in_row = tl.load(layout + BLOCKS_IN_ROW)
    first = start // row
    place = (start - first * row).to(tl.int32) + lane
    row = row.to(tl.int32)
    q = place // row
    if blocks_in_row == 1:
        block = first + q
    else:
        inside = (place - q * row) % tl.load(layout + INNER).to(tl.int32)
        block = (first + q) * blocks_in_row + inside // tl.load(layout + LENGTH).to(tl.int32)
    return block


@triton.jit
def average(
    pointers,
    layout,
    tiles,
    flags,
    ELEMENT: tl.constexpr,
    GRADIENTS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Block averages of a diagonal. Pointers: diagonal, gradient, estimate. A tensor that is not finite is flagged."""
    tensor = tl.load(tiles + 2 * tl.program_id(0))
    start = tl.load(tiles + 2 * tl.program_id(0) + 1)
    layout += tensor * LAYOUT
    diagonal = tl.load(pointers + 3 * tensor).to(tl.pointer_type(tl.float32))
    gradient = tl.load(pointers + 3 * tensor + 1).to(tl.pointer_type(ELEMENT))
    estimate = tl.load(pointers + 3 * tensor + 2).to(tl.pointer_type(tl.float32))
    if tl.load(layout + COUNT) == 1:
        _average_singles(diagonal, gradient, estimate, layout, start, flags + tensor, GRADIENTS, TILE)
    else:
        _average_blocks(diagonal, gradient, estimate, layout, start, flags + tensor, GRADIENTS, ROWS, COLUMNS)


@triton.jit
def _average_singles(diagonal, gradient, estimate, layout, start, flag, GRADIENTS: tl.constexpr, TILE: tl.constexpr):
    lane = start + tl.arange(0, TILE)
    inside = lane < tl.load(layout + BLOCKS)
    d = tl.load(diagonal + lane, mask=inside, other=0.0)
    value = tl.abs(d)
    if GRADIENTS:
        g = tl.load(gradient + lane, mask=inside, other=0.0).to(tl.float32)
        value = tl.where((d == 0.0) & (g == 0.0), UNTOUCHED, value)
    _store_estimate(estimate + lane, value, inside, flag)


@triton.jit
def _average_blocks(
    diagonal,
    gradient,
    estimate,
    layout,
    start,
    flag,
    GRADIENTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = start + tl.arange(0, ROWS)
    inside = block < tl.load(layout + BLOCKS)
    blocks_in_row = tl.load(layout + BLOCKS_IN_ROW)
    row = tl.load(layout + ROW)
    length = tl.load(layout + LENGTH)
    most = tl.load(layout + COUNT)
    stride = tl.load(layout + STRIDE)
    signed = tl.load(layout + SIGNED)
    q = block // blocks_in_row
    c = block - q * blocks_in_row
    count = tl.minimum(most, row - c * length)
    first = q * row + c * length
    total = tl.zeros([ROWS], tl.float32)
    touched = tl.zeros([ROWS], tl.int32)
    for j in range(0, most, COLUMNS):
        column = j + tl.arange(0, COLUMNS)
        place = first[:, None] + stride * column[None, :]
        here = inside[:, None] & (column[None, :] < count[:, None])
        d = tl.load(diagonal + place, mask=here, other=0.0)
        if GRADIENTS:
            g = tl.load(gradient + place, mask=here, other=0.0).to(tl.float32)
            touched = tl.maximum(touched, tl.max(((d != 0.0) | (g != 0.0)).to(tl.int32), axis=1))
        total += tl.sum(tl.where(signed != 0, d, tl.abs(d)), axis=1)
    value = tl.abs(total / count.to(tl.float32))
    if GRADIENTS:
        value = tl.where(touched != 0, value, UNTOUCHED)
    _store_estimate(estimate + block, value, inside, flag)


@triton.jit
def _store_estimate(places, value, inside, flag):
    tl.store(places, value, mask=inside)
    not_finite = inside & ~(value * value < float("inf"))
    if tl.max(not_finite.to(tl.int32), axis=0) != 0:
        tl.store(flag, 1)


@triton.jit
def weigh(pointers, weights, tensors, log_beta2, new_age, TILE: tl.constexpr):
    """The weight of a new measurement in each tensor's average. Pointers: age, dropped measurements, flag.

    A negative ``new_age`` stands for one more than the age.
    """
    tensor = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = tensor < tensors
    age_at = tl.load(pointers + 3 * tensor, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    dropped_at = tl.load(pointers + 3 * tensor + 1, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    flag_at = tl.load(pointers + 3 * tensor + 2, mask=inside, other=0).to(tl.pointer_type(tl.int32))
    dropped = tl.load(flag_at, mask=inside, other=0)
    age = tl.load(age_at, mask=inside, other=0.0)
    grown = tl.where(new_age < 0.0, age + 1.0, new_age)
    # In double precision 1 - exp keeps the digits of 1 - beta2 that float32 would lose.
    log_beta2 = tl.full([TILE], log_beta2, tl.float64)
    since = 1.0 - tl.exp((grown - age).to(tl.float64) * log_beta2)
    total = 1.0 - tl.exp(grown.to(tl.float64) * log_beta2)
    tl.store(weights + tensor, (since / total).to(tl.float32), mask=inside)
    tl.store(age_at, tl.where(dropped != 0, age, grown), mask=inside)
    tl.store(dropped_at, tl.load(dropped_at, mask=inside, other=0.0) + dropped.to(tl.float32), mask=inside)


@triton.jit
def fold(pointers, layout, tiles, weights, TILE: tl.constexpr):
    """Fold a measurement into the Hessian momentum. Pointers: estimate, Hessian rms, flag."""
    tensor = tl.load(tiles + 2 * tl.program_id(0))
    start = tl.load(tiles + 2 * tl.program_id(0) + 1)
    estimate = tl.load(pointers + 3 * tensor).to(tl.pointer_type(tl.float32))
    hessian_rms = tl.load(pointers + 3 * tensor + 1).to(tl.pointer_type(tl.float32))
    flag = tl.load(pointers + 3 * tensor + 2).to(tl.pointer_type(tl.int32))
    blocks = tl.load(layout + tensor * LAYOUT + BLOCKS)
    if tl.load(flag) == 0:
        weight = tl.load(weights + tensor)
        lane = start + tl.arange(0, TILE)
        inside = lane < blocks
        d = tl.load(estimate + lane, mask=inside, other=0.0)
        rms = tl.load(hessian_rms + lane, mask=inside, other=0.0)
        unmeasured = rms == float("inf")
        untouched = d < 0.0
        square = tl.where(untouched, 0.0, d * d)
        previous = tl.where(unmeasured, 0.0, rms * rms)
        # As torch.lerp does: from the nearer end, so that a weight of 1 gives the new value to the last digit.
        change = square - previous
        folded = tl.where(weight < 0.5, previous + weight * change, square - change * (1.0 - weight))
        tl.store(hessian_rms + lane, tl.sqrt(folded), mask=inside & ~(unmeasured & untouched))


@triton.jit(do_not_specialize=["key"])
def draw(pointers, layout, tiles, whose, key, ELEMENT: tl.constexpr, TILE: tl.constexpr):
    """Rademacher signs, those of :mod:`adahessian.curvature.probes`, for tensors of a key. Pointers: probe.

    The key lacks the parameter's position.
    """
    tensor = tl.load(tiles + 2 * tl.program_id(0))
    start = tl.load(tiles + 2 * tl.program_id(0) + 1)
    if tl.load(whose + tensor) != 0:
        signs = tl.load(pointers + tensor).to(tl.pointer_type(ELEMENT))
        position = tl.load(layout + tensor * LAYOUT + POSITION).to(tl.uint64, bitcast=True)
        own = _finalize((tl.cast(key, tl.int64).to(tl.uint64, bitcast=True) ^ position) + GOLDEN)
        element = start + tl.arange(0, TILE)
        inside = element < tl.load(layout + tensor * LAYOUT + NUMEL)
        word = _finalize(own + ((element >> 6) + 1).to(tl.uint64, bitcast=True) * GOLDEN)
        bit = (word >> (element & 63).to(tl.uint64, bitcast=True)) & 1
        tl.store(signs + element, (bit.to(tl.float32) * 2.0 - 1.0).to(ELEMENT), mask=inside)


@triton.jit
def _finalize(x):
    x = (x ^ (x >> 30)) * FACTOR1
    x = (x ^ (x >> 27)) * FACTOR2
    return x ^ (x >> 31)
