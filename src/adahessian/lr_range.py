"""Which learning rate? A range test: a few dozen steps with a rising learning rate, all of them taken back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from adahessian.curvature.passes import CurvaturePass
from adahessian.settings import is_integer, is_number
from adahessian.taken_back import training_taken_back

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LossFunction = Callable[[Any, Any], Tensor]

# The suggestion is this share of the learning rate at which the loss had made this share of its whole fall. Before the
# bottom, since from there on chance decides where the curve is lowest; and half of that, since the test takes one step
# at each learning rate, and momentum shows the harm of a step only some steps later.
_SHARE_OF_LR, _SHARE_OF_FALL = 0.5, 0.9

_FEWEST_STEPS = 20
# Steps that a scaler may skip before the test begins; each halves its scale.
_MOST_SKIPPED = 64
# Losses at the start, where the learning rate changes next to nothing yet, tell how high the loss is and how noisy.
_LOSSES_AT_START = 10
# How many of the newest losses, in the mean, tell whether they have risen.
_NEWEST = 3
# Width of the smoothing, in decades of the learning rate.
_SMOOTHING = 0.15
# What the loss of single batches does by chance: a rise of so many standard deviations, a fall of the smoothed loss.
_RISE_BY_CHANCE, _FALL_BY_CHANCE = 4.0, 1.5


@dataclass(frozen=True)
class LrRange:
    """The outcome of a range test."""

    lrs: tuple[float, ...]
    """The learning rates that were tried, rising."""

    losses: tuple[float, ...]
    """The loss of each batch, before the step with that learning rate. The last may be infinite or NaN."""

    smoothed: tuple[float, ...]
    """The same, smoothed over neighbouring learning rates; what shot up is cut off where the test calls it diverged."""

    suggestion: float
    """The learning rate to begin with: half of :attr:`nearly_down`."""

    steepest: float
    """Where the smoothed loss fell fastest for a given factor of the learning rate."""

    nearly_down: float
    """The smallest at which the smoothed loss had made nine tenths of its whole fall."""

    largest_descending: float
    """The largest, from there on, at which it had not yet lost more than a tenth of that fall again."""

    diverged_at: float | None
    """The learning rate at which the loss had risen so far that the test stopped; None if it never had."""

    @property
    def why(self) -> str:
        """What the suggestion rests on, in words."""
        if self.diverged_at is not None:
            end = f"diverged at {self.diverged_at:.2g}"
        elif self.largest_descending == self.lrs[-1]:
            end = "never rose: a larger highest would tell more"
        else:
            end = "rose after that, without diverging"
        return (
            f"lr {self.suggestion:.2g} is half of {self.nearly_down:.2g}, where the loss had made nine tenths of its "
            f"fall. It fell fastest at {self.steepest:.2g}, stayed down up to {self.largest_descending:.2g} and {end}."
        )

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the curve and what was read from it.

        Args:
            path: The file to write; its ending names the format.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                'the plot needs matplotlib: pip install "adahessian[lab]"', name=missing.name
            ) from missing
        figure = Figure(figsize=(7, 4), layout="constrained")
        _draw(self, figure.subplots())
        figure.savefig(path, dpi=160)


def suggest_lr(
    source: CurvaturePass[Any] | Optimizer,
    batches: Iterable[Any],
    *,
    model: nn.Module | None = None,
    loss_fn: LossFunction | None = None,
    scaler: GradScaler | None = None,
    lowest: float = 1e-4,
    highest: float = 10.0,
    steps: int = 80,
) -> LrRange:
    r"""Suggest a learning rate by a range test on the user's own model and data.

    Trains for a few dozen steps with a learning rate that rises exponentially,

    .. math:: \eta_i = \eta_\text{lowest} (\eta_\text{highest} / \eta_\text{lowest})^{i / (n - 1)},

    until the loss has risen above its start by as much as it had fallen. The suggestion is half of the learning rate at
    which the smoothed loss had made nine tenths of its whole fall. It is a place to begin, not the outcome of a search.

    Then everything is put back, bit by bit, also if an error or an interrupt ends it: parameters, buffers, gradients,
    modes, the optimizer's state, groups and unused measurement, the scaler, random streams and the generator of a
    loader. What has been compiled meanwhile stays compiled. An iterator, unlike a loader or a list, has been advanced.
    Hooks, those of the optimizer too, run as in training: a clipping of gradients belongs there. It needs memory for a
    second copy of the parameters and of the optimizer's state.

    Groups with different learning rates keep their ratios; what is tried and suggested is the largest of them.

    Args:
        source: What trains: a curvature pass, which knows its model, loss and optimizer, or any optimizer of torch.
        batches: What ``loss_fn`` takes, on the model's device: a loader, a list or any other iterable. One that runs
            out is started again.
        model: The model, where ``source`` is an optimizer.
        loss_fn: ``loss_fn(model, batch)`` returns the scalar loss. :class:`adahessian.Curvature` knows it.
        scaler: The ``GradScaler`` of a loop in float16. :class:`adahessian.Curvature` knows it.
        lowest: The learning rate to begin with. It should change next to nothing.
        highest: The learning rate to end with, unless the loss diverges before.
        steps: Number of steps, 20 or more.

    Returns:
        The curve, the suggestion, and what it rests on.

    Raises:
        TypeError: If ``source`` is neither, or the model or the loss is missing.
        ValueError: If an argument is out of its range, there are too few batches, or the loss is not finite from the
            start.
        RuntimeError: If no learning rate of the range lowered the loss by more than chance would, or several processes
            train together.

    Example:
        >>> import adahessian
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = adahessian.AdaHessian(model.parameters())
        >>> curvature = adahessian.Curvature(model, lambda m, batch: m(batch).square().mean(), optimizer)
        >>> found = suggest_lr(curvature, [torch.ones(8, 3)])
        >>> 0 < found.suggestion < found.largest_descending
        True
    """
    trainee = _Trainee.of(source, model, loss_fn, scaler)
    _check_range(lowest, highest, steps)
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise RuntimeError(
            "suggest_lr runs in one process, and each of several would stop at a loss of its own: run it before the "
            "processes are started, on a batch as large as that of all of them together"
        )
    lrs = [lowest * (highest / lowest) ** (i / (steps - 1)) for i in range(steps)]
    losses: list[float] = []
    with training_taken_back(trainee.model, trainee.optimizer, trainee.curvature, trainee.scaler, batches):
        set_lr = _setter_of_lr(trainee.optimizer)
        batches_enough = _enough(batches, steps)
        first = next(batches_enough)
        set_lr(0.0)
        trainee.settle_scale(first)
        for lr, batch in zip(lrs, chain([first], batches_enough), strict=True):
            set_lr(lr)
            losses.append(trainee.step(batch))
            if _has_diverged(losses):
                break
    return _read(lrs[: len(losses)], losses)


@dataclass(frozen=True)
class _Trainee:
    """All that a training step needs."""

    model: nn.Module
    loss_fn: LossFunction
    optimizer: Optimizer
    curvature: CurvaturePass[Any] | None
    scaler: GradScaler

    @classmethod
    def of(
        cls, source: object, model: nn.Module | None, loss_fn: LossFunction | None, scaler: GradScaler | None
    ) -> _Trainee:
        curvature = source if isinstance(source, CurvaturePass) else None
        optimizer = source if curvature is None else curvature.optimizer
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "suggest_lr takes a curvature pass, such as adahessian.Curvature(model, loss_fn, optimizer), or an "
                f"optimizer, but got a {type(source).__name__}"
            )
        model = getattr(curvature, "model", model)
        loss_fn = loss_fn or getattr(curvature, "loss_fn", None)
        if not isinstance(model, nn.Module) or not callable(loss_fn):
            raise TypeError(
                f"{type(source).__name__} does not know all that is needed: give suggest_lr "
                f"{'loss_fn=' if curvature is not None else 'model= and loss_fn='} as well"
            )
        scaler = scaler or getattr(curvature, "scaler", None) or GradScaler(enabled=False)
        return cls(model, loss_fn, optimizer, curvature, scaler)

    def settle_scale(self, batch: Any) -> None:
        """Bring a scaler to a scale at which gradients are finite: steps that it skips would say nothing."""
        for _ in range(_MOST_SKIPPED if self.scaler.is_enabled() else 0):
            before = self.scaler.get_scale()
            self.step(batch)
            if self.scaler.get_scale() >= before:
                return

    def step(self, batch: Any) -> float:
        """Take one step, as in training, unless the loss is not finite; returns the loss before it."""
        if self.curvature is not None:
            self.curvature.measure(batch)
        self.optimizer.zero_grad()
        with torch.enable_grad():
            loss = self.loss_fn(self.model, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise TypeError("loss_fn must return the loss as a tensor of one element")
            value = loss.item()
            if math.isfinite(value):
                # In the classic loop, without a curvature pass, the gradient carries its graph.
                create_graph = bool(getattr(self.optimizer, "curvature_due", False))
                self.scaler.scale(loss).backward(create_graph=create_graph)
                self.scaler.step(self.optimizer)
                self.scaler.update()
        return value


def _check_range(lowest: float, highest: float, steps: int) -> None:
    if not (is_number(lowest) and is_number(highest) and 0 < lowest < highest < math.inf):
        raise ValueError(f"Invalid range: {lowest!r} to {highest!r}. It must be above 0, finite and rising.")
    if not (is_integer(steps) and steps >= _FEWEST_STEPS):
        raise ValueError(f"Invalid steps: {steps!r}. It must be an integer, {_FEWEST_STEPS} or more.")


def _setter_of_lr(optimizer: Optimizer) -> Callable[[float], None]:
    """Sets the largest learning rate of the groups, and all others in proportion."""
    groups = optimizer.param_groups
    # A schedule that warms up may have begun at 0, and keeps here what it warms up to.
    own = [float(group.get("initial_lr", group["lr"])) for group in groups]
    ratios = [lr / max(own) for lr in own] if max(own) > 0 else [1.0] * len(own)

    def set_lr(lr: float) -> None:
        for group, ratio in zip(groups, ratios, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * ratio)
            else:
                group["lr"] = lr * ratio

    return set_lr


def _enough(batches: Iterable[Any], number: int) -> Iterator[Any]:
    """So many batches, begun again where they run out."""
    drawn = 0
    while True:
        before = drawn
        for batch in batches:
            yield batch
            drawn += 1
            if drawn == number:
                return
        if drawn == 0:
            raise ValueError("there are no batches: a loader or an iterable of what loss_fn takes is needed")
        if drawn == before:
            raise ValueError(
                f"the batches ran out after {drawn} of {number} steps and cannot be started again: give a loader or a "
                "list rather than an iterator, or fewer steps"
            )


# Reading the curve -------------------------------------------------------------------------------------------------


def _has_diverged(losses: Sequence[float]) -> bool:
    """Whether the loss is above its start by as much as it ever was below it, and by more than chance."""
    if not math.isfinite(losses[-1]):
        return True
    return len(losses) > _NEWEST and _mean(losses[-_NEWEST:]) > _ceiling(losses)


def _ceiling(losses: Sequence[float]) -> float:
    """Where the loss counts as diverged."""
    start, noise = _start(losses)
    lowest = min(_mean(losses[i : i + _NEWEST]) for i in range(max(1, len(losses) - _NEWEST + 1)))
    return start + max(start - lowest, _RISE_BY_CHANCE * noise)


def _start(losses: Sequence[float]) -> tuple[float, float]:
    """The loss at the start, and the standard deviation of single batches, by differences: a trend does not count."""
    first = losses[:_LOSSES_AT_START]
    squares = [(after - before) ** 2 / 2 for before, after in pairwise(first)]
    return _mean(first), math.sqrt(_mean(squares))


def _read(lrs: Sequence[float], losses: Sequence[float]) -> LrRange:
    """Find the suggestion on a curve."""
    if not math.isfinite(losses[0]):
        raise ValueError(
            f"the loss is {losses[0]} before the first step, so no learning rate is to blame: look at the batch, the "
            "model and the precision"
        )
    has_diverged = _has_diverged(losses)
    finite = [loss for loss in losses if math.isfinite(loss)]
    start, noise = _start(finite)
    ceiling = _ceiling(finite)
    smoothed = _smooth(lrs, [min(loss, ceiling) if math.isfinite(loss) else ceiling for loss in losses])
    at_lowest = smoothed.index(min(smoothed))
    fall = start - smoothed[at_lowest]
    is_down = [start - loss >= _SHARE_OF_FALL * fall for loss in smoothed]
    if len(finite) < _LOSSES_AT_START or fall <= _FALL_BY_CHANCE * noise:
        raise RuntimeError(
            f"no learning rate from {lrs[0]:.2g} to {lrs[-1]:.2g} lowered the loss by more than chance: it was "
            f"{start:.4g} at the start, give or take {noise:.2g} a batch, and {smoothed[at_lowest]:.4g} at best. "
            + (
                "Further on it rose: try a lower lowest, or larger batches. A trained network has little left to gain."
                if has_diverged
                else "Try a higher highest, larger batches or more steps."
            )
        )
    first = is_down.index(True)
    last = is_down.index(False, at_lowest) - 1 if False in is_down[at_lowest:] else len(lrs) - 1
    falls = [smoothed[max(i - 1, 0)] - smoothed[min(i + 1, at_lowest)] for i in range(at_lowest + 1)]
    return LrRange(
        lrs=tuple(lrs),
        losses=tuple(losses),
        smoothed=tuple(smoothed),
        suggestion=_SHARE_OF_LR * lrs[first],
        steepest=lrs[falls.index(max(falls))],
        nearly_down=lrs[first],
        largest_descending=lrs[last],
        diverged_at=lrs[-1] if has_diverged else None,
    )


def _smooth(lrs: Sequence[float], losses: Sequence[float]) -> list[float]:
    """Means with the weights of a bell curve around each learning rate, which lag behind in neither direction."""
    smoothed = []
    for centre in lrs:
        weights = [math.exp(-0.5 * (math.log10(lr / centre) / _SMOOTHING) ** 2) for lr in lrs]
        smoothed.append(math.fsum(w * loss for w, loss in zip(weights, losses, strict=True)) / math.fsum(weights))
    return smoothed


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _draw(found: LrRange, axes: Axes) -> None:
    # Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
    blue, orange, green, vermilion, grey = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#7A7A7A"
    axes.plot(found.lrs, found.losses, "o", color=grey, alpha=0.5, markersize=3.5, markeredgewidth=0, label="batches")
    axes.plot(found.lrs, found.smoothed, color=blue, linewidth=2, label="smoothed")
    axes.axvline(found.suggestion, color=vermilion, linewidth=2, label=f"suggestion: {found.suggestion:.2g}")
    for lr, marker, colour, label in (
        (found.steepest, "^", orange, "steepest"),
        (found.nearly_down, "o", green, "nine tenths down"),
        (found.largest_descending, "s", grey, "still down at"),
    ):
        height = found.smoothed[found.lrs.index(lr)]
        axes.plot(lr, height, marker, color=colour, markersize=8, markeredgecolor="white", label=f"{label}: {lr:.2g}")
    start, lowest = found.smoothed[0], min(*found.smoothed, *filter(math.isfinite, found.losses))
    # What rises above the start is of no interest but that it does.
    axes.set_ylim(lowest - 0.1 * (start - lowest), start + 0.25 * (start - lowest))
    axes.set_xscale("log")
    end = "did not diverge" if found.diverged_at is None else f"diverged at {found.diverged_at:.2g}"
    axes.set_title(f"{len(found.lrs)} steps with a rising learning rate; the loss {end}", loc="left", fontsize=10)
    axes.set(xlabel="learning rate", ylabel="loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E6E6E6")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="lower left")
