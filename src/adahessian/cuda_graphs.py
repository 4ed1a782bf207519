"""CUDA graphs: capture the kernels that a function launches, and replay them without Python."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from adahessian.base.errors import first_line
from adahessian.hessian.isolation import buffers_restored, devices_of, random_state_kept

Result = TypeVar("Result")


class CannotCapture(Exception):  # noqa: N818
    """The reason why a function cannot be captured."""


@dataclass(frozen=True)
class Memory:
    """Memory on the current device that graphs share, because they never run at the same time."""

    pool: Any = field(default_factory=torch.cuda.graph_pool_handle)  # its type's name depends on the torch version
    # The allocator reuses freed memory on the same stream only. Libraries keep workspaces per stream, too.
    stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)
    others: tuple[torch.cuda.Stream, ...] = field(default_factory=lambda: tuple(torch.cuda.Stream() for _ in range(3)))

    def side_by_side(self, functions: Sequence[Callable[[], object]]) -> None:
        """Run independent functions on several streams, so that they run in parallel when captured."""
        streams = (current := torch.cuda.current_stream()), *self.others
        for other in self.others:
            other.wait_stream(current)
        try:
            for number, function in enumerate(functions):
                with torch.cuda.stream(streams[number % len(streams)]):
                    function()
        finally:
            for other in self.others:  # also after an error, because a capture cannot end before all streams join
                current.wait_stream(other)


class CapturedFunction(Generic[Result]):
    """A function captured as a CUDA graph, which reads and writes existing tensors at their addresses.

    The function runs three times before the capture. Rehearsals and capture leave the model's buffers and all random
    states unchanged. A function that changes anything else must have run before, and is captured without rehearsals.
    Replaying another graph that shares the memory may overwrite this graph's result.

    Raise CannotCapture if the function fails, synchronizes with the device, draws random numbers on the host or
    replaces buffers of the model.
    """

    def __init__(self, function: Callable[[], Result], model: nn.Module, memory: Memory, rehearse: bool = True) -> None:
        with autocast_cache_disabled():
            self.is_random = rehearse and self._rehearse(function, model, memory.stream)
            self._graph = torch.cuda.CUDAGraph()
            current = torch.cuda.current_stream()
            try:
                with (
                    _failing_means_uncaptured(),
                    # thread_local, because other threads, such as data loaders, may allocate memory.
                    torch.cuda.graph(self._graph, memory.pool, memory.stream, capture_error_mode="thread_local"),
                ):
                    self._result = function()
            finally:
                torch.cuda.set_stream(current)  # a failed capture may leave its own stream current

    def replay(self) -> Result:
        """Launch the graph on the current stream. The result stays in place and is overwritten by the next replay."""
        self._graph.replay()
        return self._result

    def _rehearse(self, function: Callable[[], object], model: nn.Module, stream: torch.cuda.Stream) -> bool:
        """Run a function, and return whether it draws random numbers. Replays then advance the device's generator."""
        with buffers_restored(model), random_state_kept(model):
            on_host, on_device = _host_random_states(), torch.cuda.get_rng_state()
            stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(stream), _failing_means_uncaptured():
                    for _ in range(2):  # libraries choose their algorithms and allocate their workspaces
                        function()
                    buffers = list(model.buffers())
                    with _waiting_forbidden():
                        function()
            finally:
                # The side stream must finish writing to buffers before they are restored.
                torch.cuda.current_stream().wait_stream(stream)
            is_random = not torch.equal(on_device, torch.cuda.get_rng_state())
            if on_host != _host_random_states():
                raise CannotCapture("it draws random numbers on the host, which a graph would repeat")
            if list(map(id, buffers)) != list(map(id, model.buffers())):
                raise CannotCapture("a module replaces a buffer by a new tensor instead of writing to it in place")
            return is_random


def cuda_device_of(model: nn.Module) -> torch.device | None:
    """Return the CUDA device of a model, or None if it is on another device or on several."""
    device, *others = devices_of(model) or {torch.device("cpu")}
    return device if device.type == "cuda" and not others else None


@contextmanager
def autocast_cache_disabled() -> Iterator[None]:
    """Disable autocast's cache. A graph would otherwise read weights that were cast before its capture."""
    enabled = torch.is_autocast_cache_enabled()
    # An autocast inside the loss clears its own cache. Disabling the cache there would trigger recompilation.
    if torch.is_autocast_enabled("cuda"):
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextmanager
def _failing_means_uncaptured() -> Iterator[None]:
    """Turn errors into CannotCapture. Errors in the user's code occur again when the function runs uncaptured."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any error of the compiler or of the capture
        raise CannotCapture(first_line(error)) from error


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    """Raise an error if the host synchronizes with the device, because that would end a capture."""
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _host_random_states() -> tuple[Any, ...]:
    numpy_random = sys.modules.get("numpy.random")
    numpy_state = repr(numpy_random.get_state()) if numpy_random else None
    return bytes(torch.get_rng_state().tolist()), random.getstate(), numpy_state
