"""A whole training step, compiled and replayed as CUDA graphs."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from adahessian.curvature.batches import map_tensors, slice_batch, tensors_of
from adahessian.curvature.engine import first_line
from adahessian.curvature.isolation import devices_of, random_streams_untouched, values_restored
from adahessian.curvature.kinds import Kinds
from adahessian.curvature.measurement import Curvature
from adahessian.curvature.ways import Found
from adahessian.messages import compiling, say, say_once
from adahessian.optimizer import AdaHessian
from adahessian.sharding import mesh_of

# Rehearsals before a capture, in which libraries choose their algorithms and allocate what they need.
_REHEARSALS = 3

# Passes side by side take the memory of both: worth it as long as that of the second, for all kinds of batches, is
# small, in bytes.
_SMALL = 2**30

_NOT_CAPTURED = "nothing is captured: CUDA graphs need the model and all tensors of the batch on one CUDA device"

Result = TypeVar("Result")


class Memory(NamedTuple):
    """Memory of graphs that do not run at the same time: what one of them has freed, another takes."""

    pool: Any  # torch's own name for its type is not the same in all versions
    # What is freed on one stream is given to that stream alone. Libraries keep workspaces for each, too.
    stream: torch.cuda.Stream

    @classmethod
    def new(cls, stream: torch.cuda.Stream | None = None) -> Memory:
        """Memory that nobody has yet, of a new stream unless one is given."""
        return cls(torch.cuda.graph_pool_handle(), stream or torch.cuda.Stream())


class _Fast(NamedTuple):
    """What makes a step fast."""

    compiles: bool
    captures: bool


class CapturedStep:
    """The whole step for a batch: gradient, curvature when it is due, and update.

    Derivatives are compiled and, on a GPU, captured in CUDA graphs, so that neither Python nor launches cost anything.
    Learning-rate schedules, evaluation and checkpoints in between work as ever, since the update is an ordinary
    ``optimizer.step()``. A batch of another shape runs uncaptured unless that shape comes often. With the curvature
    on the whole batch, gradient and curvature come from one pass; on a part of it, from two. These run side by side if
    the second takes little memory, else one after the other in the same memory.

    Gradients are replaced, not added to, and hooks on parameters do not see them. To clip them before the update, do so
    in a hook of the optimizer, ``optimizer.register_step_pre_hook``. Those left in ``param.grad`` are overwritten by
    the next step. What ``loss_fn`` reads from Python objects, other than the batch and the modes of modules, is
    captured as it was.

    Args:
        curvature: The curvature pass, with its model, loss and optimizer. Whether to compile is its setting.
        capture: Whether to capture CUDA graphs. On other devices there is nothing to capture.

    Raises:
        TypeError: If ``curvature`` is no :class:`adahessian.Curvature`.
        ValueError: If its product is ``"finite_difference"``, if it is for several processes or micro-batches, or if
            ``capture`` is neither True nor False.

    Example:
        >>> import adahessian
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = adahessian.AdaHessian(model.parameters(), update_every=10)
        >>> curvature = adahessian.Curvature(model, lambda m, batch: m(batch).square().mean(), optimizer)
        >>> step = CapturedStep(curvature, capture=False)
        >>> loss = step(torch.ones(8, 3))
    """

    def __init__(self, curvature: Curvature[Any], *, capture: bool = True) -> None:
        if not isinstance(curvature, Curvature):
            raise TypeError(
                "CapturedStep takes the curvature pass, adahessian.Curvature(model, loss_fn, optimizer), but got a "
                f"{type(curvature).__name__}"
            )
        if curvature.engine.product == "finite_difference":
            raise ValueError(
                "finite differences draw random numbers several times over, which cannot be captured: take another "
                "product, or call curvature.measure(batch) in a loop of your own"
            )
        sharded = mesh_of(curvature.model) is not None
        if curvature.ranks is not None or sharded or curvature.accumulate or curvature.scaler is not None:
            raise ValueError(
                "CapturedStep takes its step alone, on one batch: for several processes or micro-batches, or with a "
                "GradScaler, write the loop out, with curvature.measure(batch) in it"
            )
        if not isinstance(curvature.optimizer, AdaHessian):
            raise ValueError(
                f"CapturedStep computes the gradients of an AdaHessian's parameters, but not all of a "
                f"{type(curvature.optimizer).__name__}'s: write the loop out, with curvature.measure(batch) in it"
            )
        if not isinstance(capture, bool):
            raise ValueError(f"Invalid capture value: {capture!r}. It must be True or False.")
        self.curvature = curvature
        self._model = curvature.model
        self._optimizer = curvature.optimizer
        self._engine = curvature.engine
        self._capture = capture
        self._loss: Callable[[Any], Tensor] | None = None
        self._kinds = Kinds()
        self._graphs: dict[Hashable, _Graphs | None] = {}
        self._memories: tuple[Memory, Memory] | None = None
        self._addresses: tuple[int, ...] = ()
        self._device: torch.device | None = None
        self._fast_on: dict[torch.device | None, _Fast] = {}

    def __call__(self, batch: Any) -> Tensor:
        """Take one step.

        Args:
            batch: What ``loss_fn`` takes, on the model's device.

        Returns:
            The loss. It is on the device: reading it waits.

        Raises:
            CurvatureError: If the curvature cannot be had. Nothing has changed then.
        """
        due = self._optimizer.curvature_due
        fast = self._fast()
        kind = self._kinds.key(batch, compiles=fast.compiles) if any(fast) else None
        loss = self._captured(kind, batch, due)
        if loss is None:
            loss = self._uncaptured(batch, due, self._compiled if kind is not None else self._plain)
        self._optimizer.step()
        return loss

    @property
    def memories(self) -> tuple[Memory, Memory]:
        """Memory for all kinds of batches: of graphs that run one after the other, and of those beside them."""
        if self._memories is None:
            self._memories = Memory.new(), Memory.new()  # made together, and so on two streams
        return self._memories

    def renew_memory_beside(self) -> None:
        """Give up the second memory, with graphs in it that are not used."""
        memory, beside = self.memories
        self._memories = memory, Memory.new(beside.stream)

    @property
    def joins(self) -> bool:
        """Whether gradient and curvature come from one pass when a measurement is due."""
        return self.curvature.batch_fraction == 1

    def gradient(self, batch: Any) -> tuple[Tensor, list[Tensor | None]]:
        """The loss and its gradients, compiled if that is wanted; buffers are updated, as in any step of training."""
        return self._derivatives(self._compiled, batch)

    def leave(self, gradients: list[Tensor | None]) -> None:
        """Put gradients where the optimizer looks for them."""
        for param, gradient in zip(self._optimizer.measured_parameters(), gradients, strict=True):
            param.grad = gradient

    def _fast(self) -> _Fast:
        """Whether anything is compiled or captured at all; found out once for each device."""
        device = next((param.device for param in self._model.parameters()), None)
        if device not in self._fast_on:
            captures = self._capture and _only_device(self._model) is not None
            if self._capture and not captures:
                say_once(_NOT_CAPTURED)
            self._fast_on[device] = _Fast(self._engine.wants_compiled()[0], captures)
        return self._fast_on[device]

    def _captured(self, kind: Hashable | None, batch: Any, due: bool) -> Tensor | None:
        """The loss by CUDA graphs, with gradients and curvature in place; None if it is to be computed uncaptured."""
        key = self._key(kind, batch)
        if key is None or self._device is None:
            return None
        with torch.cuda.device(self._device):
            if key not in self._graphs:
                self._graphs[key] = _Graphs(self, batch)
            graphs = self._graphs[key]
            if graphs is None:
                return None
            try:
                return graphs.replay(batch, due)
            except CannotCaptureError as cannot:
                self._graphs[key] = None
                self._memories = None  # of memory in which a capture has failed torch may have lost track
                say(f"the step is not captured: {cannot}")
                return None

    def _uncaptured(self, batch: Any, due: bool, loss_of: Callable[[Any], Tensor]) -> Tensor:
        if due and self.joins:
            found = self._engine.compute(batch, self._optimizer.draw_probes, keep_buffers=True)
            self.curvature.feed(found.diagonal, found.gradients)
            self.leave(found.gradients)
            return found.loss
        if due:
            self.curvature.measure(batch)
        loss, gradients = self._derivatives(loss_of, batch)
        self.leave(gradients)
        return loss

    def _derivatives(self, loss_of: Callable[[Any], Tensor], batch: Any) -> tuple[Tensor, list[Tensor | None]]:
        with torch.enable_grad():
            loss = loss_of(batch)
            params = self._optimizer.measured_parameters()
            return loss.detach(), list(torch.autograd.grad(loss, params, allow_unused=True))

    def _plain(self, batch: Any) -> Tensor:
        loss: Tensor = self.curvature.loss_fn(self._model, batch)
        return loss

    def _compiled(self, batch: Any) -> Tensor:
        if self._loss is None:
            self._loss = self._compile_loss(batch)
        return self._loss(batch)

    def _compile_loss(self, batch: Any) -> Callable[[Any], Tensor]:
        if not self._engine.wants_compiled()[0]:
            return self._plain

        def loss_of(batch: Any) -> Tensor:
            return self._plain(batch)

        # The compiler counts the versions of a function by its code, and allows eight: each model needs its own.
        loss_of.__code__ = loss_of.__code__.replace()
        compiled: Callable[[Any], Tensor] = torch.compile(loss_of, dynamic=False)
        try:
            with compiling("the gradient"), values_restored(self._model):
                self._derivatives(compiled, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler stumbles over; an error of the user's own will come again
            say(f"the gradient is not compiled: {first_line(error)}")
            return self._plain
        return compiled

    def _key(self, kind: Hashable | None, batch: Any) -> Hashable | None:
        """What the graphs for a batch are known by; None if it is to run uncaptured."""
        if not self._capture or kind is None:
            return None
        # Graphs know addresses: of tensors that have moved they know nothing.
        addresses = tuple(tensor.data_ptr() for tensor in (*self._model.parameters(), *self._model.buffers()))
        if addresses != self._addresses:
            self._graphs.clear()
            self._memories = None
            self._addresses = addresses
            self._device = _only_device(self._model)
        if self._device is None or any(tensor.device != self._device for tensor in tensors_of(batch)):
            say_once(_NOT_CAPTURED)
            return None
        return (
            kind,
            tuple(map(id, self._optimizer.measured_parameters())),
            tuple(module.training for module in self._model.modules()),
            (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
            self._optimizer.num_probes,
        )


class _Graphs:
    """The graphs for one kind of batch, each captured when it is first needed.

    Args:
        step: The step they belong to.
        batch: A batch of the kind.
    """

    def __init__(self, step: CapturedStep, batch: Any) -> None:
        self._step = step
        self._curvature = step.curvature
        self._model = step.curvature.model
        self._engine = step.curvature.engine
        self._optimizer = step.curvature.optimizer
        self._batch = map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), batch)
        self._inputs = list(tensors_of(self._batch))
        self._probes: list[list[Tensor]] = []
        self._gradient: Graph[tuple[Tensor, list[Tensor | None]]] | None = None
        self._found: Graph[Found] | None = None
        self._beside: torch.cuda.Stream | None = None

    def replay(self, batch: Any, due: bool) -> Tensor:
        """Gradient, and curvature if it is due, for a batch."""
        if due:
            self._engine.pass_by()
        with torch.no_grad():
            for static, tensor in zip(self._inputs, tensors_of(batch), strict=True):
                static.copy_(tensor, non_blocking=True)
        if due and self._step.joins:
            found = self._curvature_graph(self._batch, keep_buffers=True).replay()
            self._curvature.feed(found.diagonal, found.gradients)
            self._step.leave(found.gradients)
            return found.loss.clone()
        if due:
            # The larger graph first: the memory of the other is found within its own.
            self._gradient_graph()
            part = slice_batch(self._batch, self._curvature.batch_fraction, self._curvature.batch_dim)
            graph = self._curvature_graph(part, keep_buffers=False)
            if self._beside is None:
                with random_streams_untouched(devices_of(self._model)):
                    found = graph.replay()
                # At once: the gradient's graph, in the same memory, may write where this one has left it.
                self._curvature.feed(found.diagonal, found.gradients)
                return self._replay_gradient()
            here = torch.cuda.current_stream()
            self._beside.wait_stream(here)
            with torch.cuda.stream(self._beside):
                found = graph.replay()
            try:
                loss = self._replay_gradient()
            finally:
                here.wait_stream(self._beside)
            self._curvature.feed(found.diagonal, found.gradients)
            return loss
        return self._replay_gradient()

    def _replay_gradient(self) -> Tensor:
        loss, gradients = self._gradient_graph().replay()
        self._step.leave(gradients)
        return loss.clone()

    def _gradient_graph(self) -> Graph[tuple[Tensor, list[Tensor | None]]]:
        if self._gradient is None:
            memory, _ = self._step.memories
            self._gradient = Graph(lambda: self._step.gradient(self._batch), self._model, memory)
        return self._gradient

    def _curvature_graph(self, part: Any, *, keep_buffers: bool) -> Graph[Found]:
        """The graph of the curvature pass, with the probes of this measurement in place."""
        probes = range(self._optimizer.num_probes)
        if self._found is None:
            self._probes = [self._optimizer.draw_probes(probe) for probe in probes]
            # The choice is made, and compiled, outside of any capture.
            with _weights_cast_anew():
                compute = self._engine.way(part)

            def found() -> Found:
                return compute(part, self._probes.__getitem__, keep_buffers)

            self._found = self._beside_the_gradient(found) if not self._step.joins else None
            if self._found is None:
                memory, _ = self._step.memories
                self._found = Graph(found, self._model, memory)
        else:
            for probe in probes:
                self._optimizer.draw_probes(probe, out=self._probes[probe])
        return self._found

    def _beside_the_gradient(self, found: Callable[[], Found]) -> Graph[Found] | None:
        """The graph of a pass on a part of the batch that may run at the same time as the gradient's, if it may.

        Its kernels are many and short, and leave room for those of the gradient.
        """
        if self._gradient_graph().is_random or not _buffers_are_only_written(self._model):
            return None
        _, memory = self._step.memories
        graph = Graph(found, self._model, memory)
        if graph.is_random or graph.reserved_bytes() > _SMALL:
            del graph
            self._step.renew_memory_beside()
            return None
        self._beside = memory.stream
        return graph


class Graph(Generic[Result]):
    """What a function launches, to be replayed; its result stays where it is and is overwritten.

    Args:
        function: What to capture.
        model: The model whose buffers and random streams the rehearsals are not to change.
        memory: Memory that it shares with graphs which do not run meanwhile: what it leaves there lasts until one of
            them runs. None is memory of its own.
    """

    def __init__(self, function: Callable[[], Result], model: nn.Module, memory: Memory | None = None) -> None:
        pool, stream = memory or Memory.new()
        with _weights_cast_anew():
            with values_restored(model):
                here, there = _host_random_states(), torch.cuda.get_rng_state()
                stream.wait_stream(torch.cuda.current_stream())
                try:
                    with torch.cuda.stream(stream):
                        with _failing_means_uncaptured():
                            for _ in range(_REHEARSALS - 1):
                                function()
                        with _waiting_forbidden():
                            function()
                finally:
                    # Buffers are put back next, and not while they are written to.
                    torch.cuda.current_stream().wait_stream(stream)
                self.is_random = not torch.equal(there, torch.cuda.get_rng_state())
                if here != _host_random_states():
                    raise CannotCaptureError("it draws random numbers on the host, which a graph would freeze")
            self._graph = torch.cuda.CUDAGraph()
            here_again = torch.cuda.current_stream()
            try:
                # Other threads, such as those that load data, may go on as they like.
                with (
                    _failing_means_uncaptured(),
                    torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
                ):
                    self._result = function()
            except CannotCaptureError:
                torch.cuda.set_stream(here_again)  # a capture that fails may leave its own behind
                raise

    def reserved_bytes(self) -> int:
        """The memory that it has reserved, with all graphs that share it."""
        segments = torch.cuda.memory_snapshot()
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == self._graph.pool())

    def replay(self) -> Result:
        """Launch it all again."""
        self._graph.replay()
        return self._result


class CannotCaptureError(Exception):
    """A step that no graph can stand for. It is raised before anything has been captured."""


@contextmanager
def _failing_means_uncaptured() -> Iterator[None]:
    """What fails here is done uncaptured, where an error of the user's own will come again."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the compiler, or the capture, stumbles over
        raise CannotCaptureError(first_line(error)) from error


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    """Raise where the host would wait for the device, which a capture does not survive."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CannotCaptureError(first_line(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _weights_cast_anew() -> Iterator[None]:
    """Keep autocast from handing out weights that it has cast before: a graph would see those for ever."""
    before = torch.is_autocast_cache_enabled()
    if not torch.is_autocast_enabled("cuda"):
        # Inside of the loss autocast forgets by itself. The compiler would compile anew for another state of the cache.
        yield
        return
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _host_random_states() -> tuple[Any, ...]:
    numpy_random = sys.modules.get("numpy.random")
    numpy_state = repr(numpy_random.get_state()) if numpy_random else None
    return bytes(torch.get_rng_state().tolist()), random.getstate(), numpy_state


def _only_device(model: nn.Module) -> torch.device | None:
    """The device of a model, if that is one and on CUDA."""
    devices = devices_of(model)
    device = devices.pop() if len(devices) == 1 else None
    return device if device is not None and device.type == "cuda" else None


def _buffers_are_only_written(model: nn.Module) -> bool:
    """Whether no pass reads what another does to the buffers, as none does to the statistics of batch norm."""
    with_buffers = [module for module in model.modules() if any(b is not None for b in module._buffers.values())]
    return all(isinstance(module, _NormBase) and module.training for module in with_buffers)
