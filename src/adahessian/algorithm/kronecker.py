r"""Curvature that rotates: Kronecker factors of Hessian-vector products.

For a matrix of shape (m, n) with Hessian :math:`A \otimes B` and a product :math:`Y = H z` with a Rademacher z,

.. math::
    E[Y Y^\top] = \operatorname{tr}(B^2) \, A^2, \quad E[Y^\top Y] = \operatorname{tr}(A^2) \, B^2

so Newton's step :math:`H^{-1} M` is :math:`L^{-1/2} M R^{-1/2}` up to a scale factor, where L and R are running means
of :math:`Y Y^\top / n` and :math:`Y^\top Y / m`. L and R are block-diagonal. One probe serves all parameters, so they
sketch rows of the square of H, with contributions from other layers, as the paper's diagonal does.

A parameter has one member, or several if it is a stack of matrices. Each row of a matrix is scaled separately, and a
vector is scaled as a whole. All members of one form are processed together, so a deep network needs as many launches as
a shallow one.

If parameters are sharded over ranks, each rank has the left factors of its own rows, or its own members of a stack. It
receives whole products, so it has whole right factors and mean squares of vectors. Only the sizes of vectors and the
traces of left factors are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from adahessian.algorithm.shapes import CurvatureShape, Estimate
from adahessian.algorithm.update import decay_weights
from adahessian.base.precision import autocast_disabled

# A curvature below this value counts as zero. Its square root is still far from float32's smallest number.
TINY = 1e-30
_HUGE = 1e18  # above this a norm's square would overflow
_VANISHED = 1e-6  # of the largest element of a direction
_BETA_SIGNAL = 0.99
_LARGEST_SIGNAL = (1 - _BETA_SIGNAL) ** -0.5  # a bound by Cauchy and Schwarz, unless the mean square has underflowed
_LONGEST = 2.0  # times the length of AdamW's step
_VECTOR_DAMPING = 0.1  # of the mean curvature of a vector

Form: TypeAlias = "Vector | Matrix"
Stored: TypeAlias = Sequence[Sequence[Tensor]]  # of each parameter, in the order of ``Rotation.stored``
Part: TypeAlias = "tuple[int, int] | None"  # the first row of this rank's shard and the number of its rows
Gather: TypeAlias = Callable[[Tensor], Tensor]  # stacks the tensors of all ranks that have shards of the parameters


@dataclass(frozen=True)
class Cut:
    """A dimension, cut into nearly equal blocks; the last one is padded with zeros.

    A rank that has only some of the rows also pads its first block. The blocks of all ranks add up to whole blocks
    without the entries between rows of two ranks.
    """

    length: int
    block_size: int
    part: Part = None

    # Not cached, because the compiler cannot trace a cached property of Python 3.11.
    @property
    def size(self) -> int:
        """The size of a block."""
        return math.ceil(self.length / max(math.ceil(self.length / self.block_size), 1))

    @property
    def here(self) -> int:
        """The number of rows on this rank."""
        return self.length if self.part is None else self.part[1]

    @property
    def front(self) -> int:
        """The number of rows of the first block that are on other ranks."""
        return self.part[0] % self.size if self.part and self.here else 0

    @property
    def blocks(self) -> int:
        """The number of blocks on this rank."""
        return math.ceil((self.front + self.here) / self.size)

    def split(self, rows: Tensor) -> Tensor:
        """From (..., here, k) to (..., blocks, size, k)."""
        back = self.blocks * self.size - self.front - self.here
        padded: Tensor = pad(rows, (0, 0, self.front, back)) if self.front or back else rows
        blocks: Tensor = padded.unflatten(-2, (self.blocks, self.size))
        return blocks

    def join(self, blocks: Tensor) -> Tensor:
        """From (..., blocks, size, k) to (..., here, k)."""
        return blocks.flatten(-3, -2).narrow(-2, self.front, self.here)

    def own(self, rows: Tensor) -> Tensor:
        """From (..., length, k) to (..., here, k)."""
        return rows if self.part is None else rows.narrow(-2, *self.part)

    def inside_blocks(self, shards: int) -> set[int]:
        """Return the rows inside a block at which one of this many shards begins."""
        rows = math.ceil(self.length / shards)
        return {row for row in range(rows, self.length, rows) if row % self.size}


@dataclass(frozen=True)
class Vector:
    """Mean squares of the elements, with damping relative to their mean. Members are stacked in the first dimension."""

    length: int
    part: Part = None

    sizes = (-1,)  # the shape of a member, of which a shard may have only a part
    cuts = (None, None)  # how each tensor of the state is cut into blocks

    @property
    def stored(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of a member's state. The last is the running mean of the gradient's squared norm."""
        return {"hessian_square": (self.length,), "grad_square": ()}

    def reduce(self, products: Tensor, took_part: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Reduce products, (probes, members, length), to moments and to marks of what the loss reached."""
        return (products.square().mean(0),), (took_part,)

    def fold(self, old: Tensor, new: Tensor, reached: Tensor, weight: Tensor) -> Tensor:
        """Fold moments into their running mean."""
        return torch.where(reached, old + weight * (new - old), old)

    def rotate(self, momenta: Tensor, curvature: Sequence[Tensor]) -> Tensor:
        """Apply the inverse root of the mean squares, relative to its mean."""
        rms = curvature[0].sqrt()
        own = rms if self.part is None else rms.narrow(-1, *self.part)
        return momenta / (own / (rms.mean(-1, keepdim=True) + TINY) + _VECTOR_DAMPING)


@dataclass(frozen=True)
class Matrix:
    """Block-diagonal factors of the rows and of the columns. Members are stacked in the first dimension."""

    rows: Cut
    columns: Cut

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of a member, of which a shard may have only some rows."""
        return -1, self.columns.length

    @property
    def cuts(self) -> tuple[Cut | None, ...]:
        """How each tensor of the state is cut into blocks. A row is stored with the entries of its own block."""
        return self.rows, self.columns, self.rows, self.columns, None

    @property
    def stored(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of a member's state. The last is a running mean of each gradient row's squared norm."""
        left, right = ((cut.here, cut.size) for cut in (self.rows, self.columns))
        of_sides = {"left_factor": left, "right_factor": right, "left_root": left, "right_root": right}
        return {**of_sides, "grad_square": (self.rows.here,)}

    def reduce(self, products: Tensor, took_part: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Reduce products, (probes, members, rows, columns), to moments and to marks of what the loss reached."""
        own = self.rows.split(self.rows.own(products))
        left, right = (_outer(each).mean(0) for each in (own, self.columns.split(products.mT)))
        by_row, by_column = took_part.any(-1, keepdim=True), took_part.any(-2).unsqueeze(-1)
        marks = self.rows.split(self.rows.own(by_row)), self.columns.split(by_column)
        return (left / self.columns.length, right / self.rows.length), marks

    def fold(self, old: Tensor, new: Tensor, reached: Tensor, weight: Tensor) -> Tensor:
        """Fold moments into their running mean."""
        # Rows that the loss did not reach keep their mean. Scaling both sides keeps the factor semidefinite.
        keep = torch.where(reached, (1 - weight).sqrt(), 1.0)
        return keep * old * keep.mT + weight * new

    def rotate(self, momenta: Tensor, curvature: Sequence[Tensor]) -> Tensor:
        """Apply the inverse roots of both factors."""
        left, right = curvature
        blocks = self.rows.split(momenta)
        across = self.rows.join(left * blocks if self.rows.size == 1 else left @ blocks).mT
        rotated: Tensor = (self.columns.split(across).mT @ right).transpose(-3, -2).flatten(-2)
        return rotated.narrow(-1, 0, self.columns.length)


def _outer(blocks: Tensor) -> Tensor:
    return blocks.square().sum(-1, keepdim=True) if blocks.shape[-2] == 1 else blocks @ blocks.mT


@dataclass(frozen=True)
class Rotation(CurvatureShape):
    """A curvature that rotates the momentum of a parameter with one or several members."""

    shape: tuple[int, ...]
    form: Form
    members: int = 1
    transposed_groups: int = 0  # of a transposed convolution, whose dimensions are (in, out / groups, *kernel)
    is_stack: bool = False  # whether the state has a dimension for members, also for a single one

    @property
    def stored(self) -> dict[str, tuple[int, ...]]:  # noqa: D102
        stack = (self.members,) if self.is_stack else ()
        return {key: stack + shape for key, shape in self.form.stored.items()}

    @property
    def unsharded(self) -> set[str]:  # noqa: D102
        of_rows = {"left_factor", "left_root", "grad_square"} if isinstance(self.form, Matrix) else set()
        return set() if self.is_stack else {*self.form.stored} - of_rows

    @property
    def can_be_sharded(self) -> bool:
        """Whether the first dimension has the members, or the rows of the only member."""
        if self.transposed_groups or isinstance(self.form, Vector):
            return not self.transposed_groups
        return self.shape[0] == (self.members if self.is_stack else self.form.rows.length)

    def shard(self, first: int, number: int) -> Rotation:
        """Return the curvature of a shard that begins at this index of the first dimension."""
        form, shape = self.form, (number, *self.shape[1:])
        if self.is_stack:
            return replace(self, shape=shape, members=number)
        if isinstance(form, Matrix):
            return replace(self, shape=shape, form=replace(form, rows=replace(form.rows, part=(first, number))))
        return replace(self, shape=shape, form=replace(form, part=(first, number)))

    def split(self, tensor: Tensor) -> Tensor:
        """Stack the members of a tensor of the parameter's shape."""
        if self.transposed_groups:
            tensor = tensor.unflatten(0, (self.transposed_groups, -1)).transpose(1, 2)
        return tensor.reshape(self.members, *self.form.sizes)

    def join(self, members: Tensor) -> Tensor:
        """Undo :meth:`split`."""
        if groups := self.transposed_groups:
            channels, outputs, *kernel = self.shape
            members = members.reshape(groups, outputs, channels // groups, *kernel).transpose(1, 2)
        return members.reshape(self.shape)


@lru_cache(maxsize=65536)
def rotation_for(shape: tuple[int, ...], block_size: int, kind: str, groups: int) -> Rotation:
    """Choose the curvature of a parameter.

    A kernel, (out, in / groups, ...), has a matrix (out / groups, in / groups x kernel) for each of its groups, and so
    does a ``"transposed"`` kernel, (in, out / groups, ...). A ``"stack"``, (members, rows, ...), has a matrix for each
    of its members. The rows of a ``"table"`` are unrelated and get a diagonal.
    """
    if len(shape) < 2 or 0 in shape:
        return Rotation(shape, Vector(math.prod(shape)))
    groups = groups if shape[0] % groups == 0 else 1
    members, rows = groups, shape[0] // groups
    if kind == "transposed":
        rows = shape[1]
    elif kind == "stack" and len(shape) > 2:
        members, rows = shape[:2]
    is_stack = rows > 1 and (members > 1 or (kind == "stack" and len(shape) > 2))
    if rows == 1:  # a factor of a single row would only be noise, as in depthwise convolutions
        members, rows = 1, members
    columns = Cut(math.prod(shape) // (members * rows), block_size)
    form = Matrix(Cut(rows, 1 if kind == "table" else block_size), columns)
    return Rotation(shape, form, members, groups if kind == "transposed" else 0, is_stack)


class Family:
    """The parameters at some places of a bucket, whose members have one form."""

    def __init__(self, places: Sequence[int], rotations: Sequence[Rotation]) -> None:
        self.places, self._rotations, self.form = places, rotations, rotations[0].form
        self.counts = [rotation.members for rotation in rotations]

    def pick(self, values: Sequence[Any]) -> list[Any]:
        """Choose the values of these parameters from those of the bucket's parameters."""
        return [values[place] for place in self.places]

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Stack all members of tensors of the parameters' shapes. The stack of a single tensor may be a view."""
        pairs = zip(self._rotations, self.pick(tensors), strict=True)
        return cat([rotation.split(tensor) for rotation, tensor in pairs])

    def unstack(self, members: Tensor) -> list[Tensor]:
        """Undo :meth:`stack`."""
        pairs = zip(self._rotations, members.split(self.counts), strict=True)
        return [rotation.join(part) for rotation, part in pairs]

    def read(self, stored: Stored, key: int) -> Tensor:
        """Stack one tensor of each state. The stack of a single tensor is a view."""
        size, cut = tuple(self.form.stored.values())[key], self.form.cuts[key]
        pairs = zip(self.pick(stored), self.counts, strict=True)
        members = cat([tensors[key].reshape(count, *size) for tensors, count in pairs])
        return members if cut is None else cut.split(members)

    def write(self, stored: Stored, key: int, members: Tensor) -> None:
        """Undo :meth:`read`, in place."""
        members = members if (cut := self.form.cuts[key]) is None else cut.join(members)
        targets, parts = [tensors[key] for tensors in self.pick(stored)], members.split(self.counts)
        torch._foreach_copy_(targets, [part.view_as(old) for old, part in zip(targets, parts, strict=True)])

    def spread(self, values: Tensor, dims: int = 1) -> Tensor:
        """Repeat one value per parameter for each member, with ``dims`` dimensions."""
        parts = zip(self.pick(values.unbind()), self.counts, strict=True)
        return torch.cat([value.expand(count) for value, count in parts]).view(-1, *(1,) * (dims - 1))


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, or return a single tensor without a copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def families_of(rotations: Sequence[Rotation]) -> list[Family]:
    """Sort the parameters of a bucket by the form of their members. Empty parameters have no family."""
    places: dict[Form, list[int]] = {}
    for place, rotation in enumerate(rotations):
        if rotation.members and rotation.form != Vector(0):  # an empty shard has whole right factors to keep
            places.setdefault(rotation.form, []).append(place)
    return [Family(own, [rotations[place] for place in own]) for own in places.values()]


def over_shards(families: Sequence[Family], values: Sequence[Tensor], gather: Gather) -> list[Tensor]:
    """Gather values of the families' members, (k, members), from all shards, (shards, k, members).

    They are sent in the order of parameters, because shards of unequal length are in different families.
    """
    pairs = zip(families, values, strict=True)
    columns = dict(each for family, of_one in pairs for each in zip(family.places, of_one.unbind(-1), strict=True))
    places = sorted(columns)
    gathered = dict(zip(places, gather(torch.stack([columns[place] for place in places], -1)).unbind(-1), strict=True))
    return [torch.stack([gathered[place] for place in family.places], -1) for family in families]


def reduce_rotations(
    families: Sequence[Family], products: Sequence[Sequence[Tensor]], gradients: Sequence[Tensor] | None
) -> list[Estimate]:
    """Reduce products, one list per probe, to the moments of each parameter and to marks of what the loss reached."""
    estimates = [Estimate((), products[0][0].new_zeros((), dtype=torch.bool))] * len(products[0])
    for family in families:
        stacks = cat([family.stack(of_probe)[None] for of_probe in products])
        took_part = torch.ones_like(stacks[0], dtype=torch.bool)
        if gradients is not None:
            took_part = stacks.ne(0).any(0).logical_or_(family.stack(gradients).ne(0))
        moments, marks = family.form.reduce(stacks, took_part)
        not_finite = torch.stack([each.flatten(1).sum(1) for each in moments]).isfinite().all(0).logical_not()
        parts = zip(*(each.split(family.counts) for each in (not_finite, *moments, *marks)), strict=True)
        for place, (flag, *values) in zip(family.places, parts, strict=True):
            estimates[place] = Estimate(tuple(values), flag[0] if len(flag) == 1 else flag.any())
    return estimates


def fold_rotations(
    families: Sequence[Family], stored: Stored, estimates: Sequence[Estimate], weights: Tensor, not_finite: Tensor
) -> None:
    """Fold one measurement of each parameter into its running means, in place, unless it is not finite."""
    for family in families:
        values = list(map(cat, zip(*(each.values for each in family.pick(estimates)), strict=True)))
        half = len(values) // 2
        for key, (new, reached) in enumerate(zip(values[:half], values[half:], strict=True)):
            old, weight = family.read(stored, key), family.spread(weights, new.dim())
            folded = family.form.fold(old, new, reached, weight)
            family.write(stored, key, torch.where(family.spread(not_finite, new.dim()), old, folded))


def take_rotated_steps(
    families: Sequence[Family],
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    stored: Stored,
    number: float | Tensor,
    group: dict[str, Any],
    gather: Gather | None = None,
) -> None:
    """Take the step with this number, in place. A tensor holds one number per parameter."""
    lr, beta1, decay = group["lr"], group["betas"][0], group["weight_decay"]  # numbers or tensors
    if isinstance(lr, Tensor):  # reading it from another device would synchronize, and a CUDA graph would freeze it
        lr = lr.item() if lr.is_cpu and not group["capturable"] else lr.squeeze().to(params[0].device)
    # Sharded vectors step together, because their ranks exchange all sizes at once.
    cut = [] if gather is None else [family for family in families if isinstance(family.form, Vector)]
    for together in [*([family] for family in families if family not in cut), *([cut] if cut else [])]:
        directions, sizes = [], []
        for family in together:
            own = family.pick(grads)
            descent = torch._foreach_neg(own) if group["maximize"] else own
            _average(family.pick(exp_avgs), descent, beta1)
            direction, of_family = _direction(family, exp_avgs, stored)
            norm = torch.linalg.vector_norm(family.stack(grads).view_as(direction), dim=-1, dtype=direction.dtype)
            directions.append(direction)
            sizes.append([norm, *of_family])
        if gather is not None and together is cut:
            sizes = _sizes_of_all_shards(together, directions, sizes, gather)
        for family, direction, (norm, *of_family) in zip(together, directions, sizes, strict=True):
            squares = family.read(stored, -1).view_as(norm).lerp(norm.clamp(max=_HUGE).square(), 1 - _BETA_SIGNAL)
            family.write(stored, -1, squares)
            # Read again, because torch's compiler would compute the mean a second time, from the values just written.
            squares = family.read(stored, -1).view_as(norm)
            scale = lr * _scale(family, squares, of_family, number, beta1)
            updates = direction.mul_(scale[..., None]).to(params[0].dtype)
            if isinstance(decay, Tensor) or decay:
                decay_weights(family.pick(params), 1 - lr * decay)
            torch._foreach_sub_(family.pick(params), family.unstack(updates))


def _average(exp_avgs: list[Tensor], values: Sequence[Tensor], beta: float | Tensor) -> None:
    if isinstance(beta, Tensor):  # the compiler fuses operations on lists into one kernel
        torch._foreach_mul_(exp_avgs, beta)
        torch._foreach_add_(exp_avgs, torch._foreach_mul(list(values), 1 - beta))
    else:
        torch._foreach_lerp_(exp_avgs, list(values), 1 - beta)


def _direction(family: Family, exp_avgs: Sequence[Tensor], stored: Stored) -> tuple[Tensor, list[Tensor]]:
    r"""Rotate momenta to directions, :math:`u = L^{-1/2} m R^{-1/2}`, and measure the rows of both.

    A vector counts as a matrix with one row. The returned sizes of the rows have the shape (members, rows). They are
    :math:`|m|`, :math:`|u|`, :math:`\langle m, u \rangle`, :math:`|m|_1`, the number of elements that move, and the
    largest element of u. Each row of u has been divided by its largest element.
    """
    norm = torch.linalg.vector_norm
    # One mean or root per dimension. The factors before them are not needed.
    *curvature, grad_square = [family.read(stored, key) for key in range(-len(family.form.sizes) - 1, 0)]
    momenta = family.stack(exp_avgs).to(grad_square.dtype)
    rows = (len(momenta), grad_square[0].numel(), momenta.shape[-1])
    u, m = family.form.rotate(momenta, curvature).reshape(rows), momenta.view(rows)
    # The scale cancels, but squares would overflow. Shards may be empty.
    largest = (norm(u, math.inf, -1) if u.shape[-1] else u.new_zeros(rows[:2])) + TINY
    u = u.div_(largest[..., None])
    moved = u.abs().gt(_VANISHED).sum(-1).to(u)  # excludes columns whose inputs have long been zero
    return u, [norm(m, dim=-1), norm(u, dim=-1), (m * u).sum(-1), norm(m, 1, -1), moved, largest]


def _sizes_of_all_shards(
    vectors: Sequence[Family], directions: Sequence[Tensor], sizes: Sequence[Sequence[Tensor]], gather: Gather
) -> list[list[Tensor]]:
    """Combine the sizes of :func:`_direction`, after the gradient's norm, and give directions a common scale."""
    combined = []
    of_all = over_shards(vectors, [torch.stack(tuple(each)).squeeze(-1) for each in sizes], gather)
    for direction, (*_, own), of_shards in zip(directions, sizes, of_all, strict=True):
        largest = of_shards[:, -1].amax(0)
        direction.mul_((own / largest[:, None])[..., None])
        relative = of_shards[:, -1] / largest
        of_shards[:, 2:4] *= relative[:, None]
        of_shards[:, -2] *= relative > _VANISHED
        norms, sums = torch.linalg.vector_norm(of_shards[:, :3], dim=0), of_shards[:, 3:].sum(0)
        combined.append([each[:, None] for each in (*norms.unbind(), *sums.unbind())])
    return combined


def _scale(family: Family, squares: Tensor, sizes: Sequence[Tensor], number: Any, beta1: float | Tensor) -> Tensor:
    r"""Compute the scale of each row of the directions.

    .. math::
        s = \frac{|\hat m|}{\sqrt{\overline{|g|^2}}}, \quad
        \rho = \frac{|m|_1 \, \mathrm{rms}(u)}{\langle m, u \rangle}, \quad
        c = \frac{s}{\mathrm{rms}(u)} \min(\max(\rho, 1), 2)

    The root mean square of AdamW's step is about :math:`\eta s`, and the step lowers the loss by about
    :math:`\eta s |m|_1`. A step of the same length along u lowers the loss :math:`\rho` times less. The step is
    therefore :math:`\rho` times as long, but never shorter than AdamW's step or more than twice as long.
    """
    t = family.spread(number, 2) if isinstance(number, Tensor) else number
    m_norm, u_norm, inner, m_sum, moved, _ = sizes
    signal = m_norm.clamp(max=_HUGE) / (1 - beta1**t) / ((squares / (1 - _BETA_SIGNAL**t)).sqrt() + TINY)
    signal = signal.clamp(max=_LARGEST_SIGNAL)
    rms = u_norm / moved.clamp(min=1).sqrt() + TINY
    longer = (m_sum * rms / (inner + TINY)).nan_to_num(0.0).clamp(1.0, _LONGEST)  # sums may overflow
    return signal * longer / rms


def rotated_update(exp_avg: Tensor, shape: Rotation, stored: Sequence[Tensor], number: float, beta1: float) -> Tensor:
    """Compute the update of one parameter with this momentum. For diagnosis."""
    family = Family([0], [shape])
    with autocast_disabled():
        direction, sizes = _direction(family, [exp_avg], [stored])
    squares = family.read([stored], -1).view_as(sizes[0])
    return family.unstack(direction * _scale(family, squares, sizes, number, beta1)[..., None])[0]


def condition(shape: Rotation, stored: Sequence[Tensor], damping: Tensor) -> dict[str, Tensor]:
    """The condition of the damped factors, and the share of their directions that damping dominates. For diagnosis."""
    if not isinstance(shape.form, Matrix):
        return {}
    conditions, damped = [], []
    for factor, cut in zip(stored[:2], (shape.form.rows, shape.form.columns), strict=True):
        values = torch.linalg.eigvalsh(cut.split(factor.double())).view(shape.members, -1)
        values = values.sort().values[:, -cut.length :]  # without the zeros of padded rows
        relative = values / (values.mean(1, keepdim=True) + TINY)
        conditions.append(((relative[:, -1] + damping) / (relative[:, 0] + damping)).max())
        damped.append(relative.lt(damping).flatten())
    return {"condition": torch.stack(conditions).max(), "damped": torch.cat(damped).double().mean()}
