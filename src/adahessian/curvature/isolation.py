"""A pass through a model that leaves no trace."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Keep a model's gradients, buffers and modes, and the user's random streams, as they are."""
    with random_streams_untouched(devices_of(model)), model_untouched(model):
        yield


def devices_of(model: nn.Module) -> set[torch.device]:
    """The devices on which a model has its tensors."""
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())}


@contextmanager
def model_untouched(model: nn.Module) -> Iterator[None]:
    """Keep a model's gradients, buffers and modes as they are.

    Gradients and buffers are exchanged rather than restored afterwards: a graph that waits for its backward may have
    saved the originals, and would notice being written to.
    """
    modules = list(model.modules())
    modes = [module.training for module in modules]
    params = list(model.parameters())
    gradients = [param.grad for param in params]
    buffers = [(module, dict(module._buffers)) for module in modules if module._buffers]
    originals_once = list(dict.fromkeys(each for _, own in buffers for each in own.values() if each is not None))
    # Once for each tensor: what modules share, they go on sharing.
    copies = dict(zip(originals_once, _clones(originals_once), strict=True))
    with hooks_silenced(params):
        try:
            for param in params:
                param.grad = None
            for module, originals in buffers:
                for name, buffer in originals.items():
                    if buffer is not None:
                        module._buffers[name] = copies[buffer]
            yield
        finally:
            for module, originals in buffers:
                for name, buffer in originals.items():
                    if not _is_cache(buffer, module._buffers.get(name)):
                        module._buffers[name] = buffer
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode


def _is_cache(before: Tensor | None, after: Tensor | None) -> bool:
    """Whether a buffer has grown in the pass, as tables of positions do: its module counts on finding it so."""
    return after is not None and (before is None or before.shape != after.shape)


@contextmanager
def values_restored(model: nn.Module) -> Iterator[None]:
    """Put back, in place, what a rehearsal does to buffers and random streams: compiled code knows their addresses."""
    put_back = _remember_buffers(model)
    with random_streams_untouched(devices_of(model)):
        try:
            yield
        finally:
            put_back()


@contextmanager
def buffers_kept_on_success(model: nn.Module) -> Iterator[None]:
    """Put back, in place, what a pass does to buffers if it fails."""
    put_back = _remember_buffers(model)
    try:
        yield
    except BaseException:
        put_back()
        raise


def remembered(model: nn.Module, *, buffers: bool) -> Callable[[], None]:
    """Returns what puts back, in place, torch's random streams and, if they are to be, a model's buffers."""
    on_host = torch.get_rng_state()
    accelerators = [device for device in devices_of(model) if device.type not in ("cpu", "meta")]
    on_devices = [torch.get_device_module(device).get_rng_state(device) for device in accelerators]
    put_buffers_back = _remember_buffers(model) if buffers else None

    def put_back() -> None:
        torch.set_rng_state(on_host)
        for device, state in zip(accelerators, on_devices, strict=True):
            torch.get_device_module(device).set_rng_state(state, device)
        if put_buffers_back is not None:
            put_buffers_back()

    return put_back


@torch.no_grad()
def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors, a list at a time: on a GPU each launch counts."""
    clones = [torch.empty_like(tensor) for tensor in tensors]
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(i)
    for members in alike.values():
        torch._foreach_copy_([clones[i] for i in members], [tensors[i] for i in members])
    return clones


def _remember_buffers(model: nn.Module) -> Callable[[], None]:
    """Returns what brings the buffers back: the tensors, which modules may replace by others, and their values."""
    tensors = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    buffers = list(model.buffers())
    values = list(zip(buffers, _clones(buffers), strict=True))

    @torch.no_grad()
    def put_back() -> None:
        for module, originals in tensors:
            module._buffers.update(originals)
        for buffer, value in values:
            buffer.copy_(value)

    return put_back


@contextmanager
def hooks_silenced(params: Iterable[Tensor]) -> Iterator[None]:
    """Keep the user's hooks on gradients from being run on what is no gradient of theirs."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooked = [(param, kind, getattr(param, kind)) for param in params for kind in kinds if getattr(param, kind, None)]
    try:
        for param, kind, _ in hooked:
            setattr(param, kind, None)
        yield
    finally:
        for param, kind, hooks in hooked:
            setattr(param, kind, hooks)


@contextmanager
def random_streams_untouched(devices: Iterable[torch.device]) -> Iterator[None]:
    """Put back what a pass draws: from torch, on the host and on these devices, from Python, from NumPy if loaded."""
    numpy_random = sys.modules.get("numpy.random")
    numpy_state = numpy_random.get_state() if numpy_random else None
    python_state = random.getstate()
    accelerators: dict[str, list[int]] = {}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            accelerators.setdefault(device.type, []).append(device.index or 0)
    device_type, indices = next(iter(accelerators.items()), ("cuda", []))
    with torch.random.fork_rng(devices=indices, device_type=device_type):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy_random:
                numpy_random.set_state(numpy_state)


@contextmanager
def transforms_closed() -> Iterator[None]:
    """Close what is left open when the compiler's backend fails inside a transform of torch.func, as in torch 2.13.

    Saved-tensor hooks would stay forbidden, and forward differentiation nested, for the rest of the process.
    """
    autograd = torch._C._autograd
    forbidden = autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    except BaseException:
        if forbidden is None:
            autograd._saved_tensors_hooks_enable()
        if torch.autograd.forward_ad._current_level < 0:
            with suppress(RuntimeError):
                torch._C._exit_dual_level(level=0)
        raise
