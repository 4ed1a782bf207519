"""The fused Triton kernels. Each processes a list of tensors in one launch.

A launch gets tables instead of tensors. Row ``t`` of ``pointers`` holds the addresses for tensor ``t``. Row ``t`` of
``layout`` maps its elements to blocks. Each row of ``tiles`` holds the tensor and the start position of one program.

Element ``m`` of a tensor, in memory order, belongs to block

    (m // row) * blocks_in_row + (m % row % inner) // length

With ``q = k // blocks_in_row`` and ``c = k % blocks_in_row``, the elements of block ``k`` are

    q * row + c * length + stride * j,    0 <= j < min(count, row - c * length)
"""

# No ``from __future__ import annotations``, because Triton evaluates annotations when it compiles.

import triton
import triton.language as tl

# Columns of ``layout``. LANE_ROWS is the number of rows of lanes per block, or 0 if blocks are not whole rows of lanes.
# OFFSET is the index of the tensor's first block among the blocks of all tensors.
NUMEL, BLOCKS, ROW, BLOCKS_IN_ROW, INNER, LENGTH, COUNT, STRIDE = map(tl.constexpr, range(8))
LANE_ROWS, POSITION, OFFSET, LAYOUT = map(tl.constexpr, range(8, 12))

TILE = tl.constexpr(1024)  # elements or blocks per program
ROWS = tl.constexpr(32)  # blocks per program if blocks have several elements
COLUMNS = tl.constexpr(32)  # elements of each block that the program then reads at a time
LANES = tl.constexpr(32)  # elements per row of lanes

UNTOUCHED = tl.constexpr(-1.0)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FACTOR1 = tl.constexpr(0xBF58476D1CE4E5B9)
FACTOR2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def step(
    pointers,
    layout,
    tiles,
    gradient_scale,
    step_scale,
    decay,
    momentum_weight,
    eps,
    power,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Take a step in one pass over memory. Pointers: parameter, gradient, momentum, Hessian rms."""
    tensor = tl.load(tiles + 2 * tl.program_id(0))
    start = tl.load(tiles + 2 * tl.program_id(0) + 1)
    layout += tensor * LAYOUT
    param = tl.load(pointers + 4 * tensor).to(tl.pointer_type(ELEMENT))
    grad = tl.load(pointers + 4 * tensor + 1).to(tl.pointer_type(ELEMENT))
    exp_avg = tl.load(pointers + 4 * tensor + 2).to(tl.pointer_type(ELEMENT))
    rms = tl.load(pointers + 4 * tensor + 3).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        param = tl.multiple_of(param, 16)
        grad = tl.multiple_of(grad, 16)
        exp_avg = tl.multiple_of(exp_avg, 16)
    left = tl.load(layout + NUMEL) - start
    # The hint makes the compiler read whole tiles sixteen bytes at a time.
    start = tl.multiple_of(start, TILE)
    param += start
    grad += start
    exp_avg += start
    lane_rows = tl.load(layout + LANE_ROWS)
    scalars = (gradient_scale, step_scale, decay, momentum_weight, eps, power)
    if left < TILE:
        _step_tile(param, grad, exp_avg, rms, layout, scalars, start, tl.arange(0, TILE) < left, ELEMENT)
    elif lane_rows != 0:
        _step_lane_rows(param, grad, exp_avg, rms, scalars, start // LANES, lane_rows, ELEMENT)
    else:
        # The compiler removes a constant mask.
        _step_tile(param, grad, exp_avg, rms, layout, scalars, start, tl.full([TILE], True, tl.int1), ELEMENT)


@triton.jit
def _step_tile(param, grad, exp_avg, rms, layout, scalars, start, inside, ELEMENT: tl.constexpr):
    lane = tl.arange(0, TILE)
    p = tl.load(param + lane, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + lane, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + lane, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(rms + _find_blocks(layout, start, lane), mask=inside, other=1.0)
    p, m = _advance(p, g, m, d, scalars)
    tl.store(param + lane, p.to(ELEMENT), mask=inside)
    tl.store(exp_avg + lane, m.to(ELEMENT), mask=inside)


@triton.jit
def _step_lane_rows(param, grad, exp_avg, rms, scalars, first, lane_rows, ELEMENT: tl.constexpr):
    """Step a whole tile, and read the Hessian rms once per row of lanes instead of once per element."""
    row = tl.arange(0, TILE // LANES)
    lane = row[:, None] * LANES + tl.arange(0, LANES)[None, :]
    d = tl.load(rms + (first + row) // lane_rows)
    p = tl.load(param + lane).to(tl.float32)
    g = tl.load(grad + lane).to(tl.float32)
    m = tl.load(exp_avg + lane).to(tl.float32)
    p, m = _advance(p, g, m, d[:, None], scalars)
    tl.store(param + lane, p.to(ELEMENT))
    tl.store(exp_avg + lane, m.to(ELEMENT))


@triton.jit
def _advance(p, g, m, d, scalars):
    gradient_scale, step_scale, decay, momentum_weight, eps, power = scalars
    if power != 1.0:
        d = tl.where(power == 0.0, 1.0, tl.exp2(power * tl.log2(d)))  # 0 times the logarithm of 0 or inf is NaN
    m += (g * gradient_scale - m) * momentum_weight
    return p * decay + step_scale * (m / (d + eps)), m


@triton.jit
def _find_blocks(layout, start, lane):
    """Return the blocks of the elements ``start + lane``. Only ``start`` needs a 64-bit division."""
    row = tl.load(layout + ROW)
    blocks_in_row = tl.load(layout + BLOCKS_IN_ROW)
    first = start // row
    place = (start - first * row).to(tl.int32) + lane
    row = row.to(tl.int32)
    q = place // row
    block = first + q
    if blocks_in_row != 1:
        inside = (place - q * row) % tl.load(layout + INNER).to(tl.int32)
        block = block * blocks_in_row + inside // tl.load(layout + LENGTH).to(tl.int32)
    return block


@triton.jit
def reduce(
    pointers, layout, tiles, values, flags, ELEMENT: tl.constexpr, GRADIENTS: tl.constexpr, SIGNED: tl.constexpr
):
    """Compute the magnitude of each block, and flag each tensor that is not finite. Pointers: diagonal, gradient."""
    tensor = tl.load(tiles + 2 * tl.program_id(0))
    start = tl.load(tiles + 2 * tl.program_id(0) + 1)
    layout += tensor * LAYOUT
    diagonal = tl.load(pointers + 2 * tensor).to(tl.pointer_type(tl.float32))
    gradient = tl.load(pointers + 2 * tensor + 1).to(tl.pointer_type(ELEMENT))
    values += tl.load(layout + OFFSET)
    if tl.load(layout + COUNT) == 1:
        _reduce_elements(diagonal, gradient, values, layout, start, flags + tensor, GRADIENTS)
    else:
        _reduce_blocks(diagonal, gradient, values, layout, start, flags + tensor, GRADIENTS, SIGNED)


@triton.jit
def _reduce_elements(diagonal, gradient, values, layout, start, flag, GRADIENTS: tl.constexpr):
    """Reduce blocks of one element."""
    lane = start + tl.arange(0, TILE)
    inside = lane < tl.load(layout + BLOCKS)
    d = tl.load(diagonal + lane, mask=inside, other=0.0)
    value = tl.abs(d)
    if GRADIENTS:
        g = tl.load(gradient + lane, mask=inside, other=0.0).to(tl.float32)
        value = tl.where((d == 0.0) & (g == 0.0), UNTOUCHED, value)
    _store_values(values + lane, value, inside, flag)


@triton.jit
def _reduce_blocks(diagonal, gradient, values, layout, start, flag, GRADIENTS: tl.constexpr, SIGNED: tl.constexpr):
    block = start + tl.arange(0, ROWS)
    inside = block < tl.load(layout + BLOCKS)
    blocks_in_row = tl.load(layout + BLOCKS_IN_ROW)
    row = tl.load(layout + ROW)
    length = tl.load(layout + LENGTH)
    most = tl.load(layout + COUNT)
    stride = tl.load(layout + STRIDE)
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
        total += tl.sum(d if SIGNED else tl.abs(d), axis=1)
    value = tl.abs(total / count.to(tl.float32))
    if GRADIENTS:
        value = tl.where(touched != 0, value, UNTOUCHED)
    _store_values(values + block, value, inside, flag)


@triton.jit
def _store_values(places, value, inside, flag):
    tl.store(places, value, mask=inside)
    # A later step squares the values, so a square that overflows counts too.
    not_finite = inside & ~(value * value < float("inf"))
    if tl.max(not_finite.to(tl.int32), axis=0) != 0:
        tl.store(flag, 1)


@triton.jit
def fold(pointers, layout, tiles, flags, weights):
    """Fold a measurement into the Hessian rms. Pointers: values, Hessian rms."""
    tensor = tl.load(tiles + 2 * tl.program_id(0))
    start = tl.load(tiles + 2 * tl.program_id(0) + 1)
    values = tl.load(pointers + 2 * tensor).to(tl.pointer_type(tl.float32))
    rms_at = tl.load(pointers + 2 * tensor + 1).to(tl.pointer_type(tl.float32))
    if tl.load(flags + tensor) == 0:
        weight = tl.load(weights + tensor)
        lane = start + tl.arange(0, TILE)
        inside = lane < tl.load(layout + tensor * LAYOUT + BLOCKS)
        d = tl.load(values + lane, mask=inside, other=0.0)
        rms = tl.load(rms_at + lane, mask=inside, other=0.0)
        unmeasured = rms == float("inf")
        untouched = d < 0.0
        square = tl.where(untouched, 0.0, d * d)
        previous = tl.where(unmeasured, 0.0, rms * rms)
        # Like torch.lerp, this starts from the nearer end, so a weight of 1 gives exactly the new value.
        change = square - previous
        folded = tl.where(weight < 0.5, previous + weight * change, square - change * (1.0 - weight))
        tl.store(rms_at + lane, tl.sqrt_rn(folded), mask=inside & ~(unmeasured & untouched))


@triton.jit(do_not_specialize=["key"])
def draw(pointers, layout, tiles, key, ELEMENT: tl.constexpr):
    """Draw the signs of :mod:`adahessian.algorithm.probes`. Pointers: probe."""
    tensor = tl.load(tiles + 2 * tl.program_id(0))
    start = tl.load(tiles + 2 * tl.program_id(0) + 1)
    layout += tensor * LAYOUT
    signs = tl.load(pointers + tensor).to(tl.pointer_type(ELEMENT))
    position = tl.load(layout + POSITION).to(tl.uint64, bitcast=True)
    counter = _finalize((tl.cast(key, tl.int64).to(tl.uint64, bitcast=True) ^ position) + GOLDEN)
    element = start + tl.arange(0, TILE)
    word = _finalize(counter + ((element >> 6) + 1).to(tl.uint64, bitcast=True) * GOLDEN)
    bit = (word >> (element & 63).to(tl.uint64, bitcast=True)) & 1
    tl.store(signs + element, (bit.to(tl.float32) * 2.0 - 1.0).to(ELEMENT), mask=element < tl.load(layout + NUMEL))


@triton.jit
def _finalize(x):
    x = (x ^ (x >> 30)) * FACTOR1
    x = (x ^ (x >> 27)) * FACTOR2
    return x ^ (x >> 31)
