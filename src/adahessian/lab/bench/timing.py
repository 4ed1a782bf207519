"""Seconds a step, in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class Candidate:
    """Something to time.

    Args:
        step: Does it once.
        period: Calls that make a whole: one in so many is dearer than the others.
    """

    step: Callable[[], object]
    period: int = 1


@dataclass(frozen=True, kw_only=True)
class Stopwatch:
    """Times candidates in turns: what else a machine does then slows all of them alike.

    Args:
        device: Where the work is done.
        rounds: How often each has its turn.
        min_seconds: Length of a turn at least; turns always hold whole periods.
    """

    device: torch.device
    rounds: int
    min_seconds: float

    def in_turns(self, candidates: Mapping[str, Candidate]) -> dict[str, list[float]]:
        """Seconds a step of each candidate, one number a round. They must have been warmed up."""
        lengths = {name: self._length_of_turn(candidate) for name, candidate in candidates.items()}
        seconds: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(self.rounds):
            for name, candidate in candidates.items():
                seconds[name].append(self.seconds(candidate, lengths[name]) / lengths[name])
        return seconds

    def seconds(self, candidate: Candidate, steps: int) -> float:
        """Time of so many steps, from an idle device to an idle device."""
        self._wait()
        started = time.perf_counter()
        for _ in range(steps):
            candidate.step()
        self._wait()
        return time.perf_counter() - started

    def _length_of_turn(self, candidate: Candidate) -> int:
        one_period = self.seconds(candidate, candidate.period)
        return candidate.period * max(1, math.ceil(self.min_seconds / one_period))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def median_ratio(seconds: Sequence[float], to: Sequence[float]) -> float:
    """The ratio within each round, and then the median: a slow round slows both."""
    return median(own / other for own, other in zip(seconds, to, strict=True))
