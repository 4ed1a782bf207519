"""H z of a model sharded by FSDP2, gathering the parameters of one FSDP2 module at a time.

Whole parameters are dual numbers theta + epsilon z, so an ordinary backward pass computes g + epsilon H z. Hooks gather
theta and draw z when a module needs them, and free them afterwards. Each gradient is reduce-scattered as soon as it is
complete. A rank therefore needs memory for its shards and for one whole module, as in training.

Forward over reverse is exact for norm layers. In torch 2.13, reverse over forward is wrong for norm layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import register_multi_grad_hook

from adahessian.base.batches import map_tensors
from adahessian.base.errors import explain
from adahessian.base.log import info_once, warn_once
from adahessian.base.shards import gather_on_mesh, is_sharded, sum_to_shard
from adahessian.hessian.attention import plain_attention
from adahessian.hessian.check import UnusableError, bounds_for, errors, reason
from adahessian.hessian.compiled import FORWARD_SUBSTITUTES
from adahessian.hessian.double_backward import Derivatives, Request, double_backward
from adahessian.hessian.engine import SUBSTITUTES
from adahessian.hessian.isolation import isolated, random_state_kept
from adahessian.parallel.fsdp import gathered, hooks_replaced, reshard
from adahessian.parallel.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Copies of the parameters that the comparison with the gathered product needs: theta, g, z, H z and one to spare.
_COPIES_TO_COMPARE = 5


class LayerwisePass:
    """Curvature pass of a sharded model that gathers one FSDP2 module at a time.

    The first product is compared with the product of the gathered model. If the two differ or this pass fails,
    ``choose`` returns False, and the caller computes all products with the gathered model.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor], ranks: Ranks, *, needs_marks: bool) -> None:
        self._model, self._loss_fn, self._ranks, self._needs_marks = model, loss_fn, ranks, needs_marks
        self.works: bool | None = None  # not known yet

    def choose(self, batch: Any, request: Request) -> bool:
        """Return whether this pass measures the step that begins with this batch. All ranks return the same value."""
        if self.works is None:
            reshard(self._model)
            try:
                self.works = self._compare(batch, request._replace(num_probes=1))
            except UnusableError as error:
                self.works = False
                warn_once(f"The curvature pass gathers the whole sharded model, because {error}.")
        return bool(self.works)

    def measure(self, batch: Any, request: Request, weight: float) -> Derivatives:
        """Return weighted sums over ranks, as shards. The gradients only mark the elements that the losses reached."""
        reshard(self._model)
        with random_state_kept(self._model):
            found = []
            for probe in range(request.num_probes):
                with random_state_kept(self._model):
                    found.append(
                        _Pass(self._model, request, probe, weight, self._needs_marks).run(self._loss_fn, batch)
                    )
        products = [products for _, products, _ in found]
        return Derivatives(found[0][0], found[0][2] if self._needs_marks else products[0], [], products)

    def _compare(self, batch: Any, request: Request) -> bool | None:
        """Compare this pass with the gathered model, and return None if another batch must decide.

        Raise an UnusableError if the products differ or this pass fails.
        """
        managed = {param for group in _groups_of(self._model).values() for param in group.params}
        if not managed.issuperset(request.params):
            raise UnusableError("the optimizer has parameters that fully_shard does not manage")
        if self._any(not _fits(request.params)):
            warn_once("The sharded curvature pass is not checked, because the gathered model does not fit into memory.")
            return True
        loss, expected = self._gathered_products(batch, request)
        if self._any(not all(each is None or each.isfinite().all() for each in (loss, *expected))):
            return None
        try:
            (products,) = self.measure(batch, request, 1.0).products
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # operations may lack a forward derivative
            raise UnusableError(f"gathering one module at a time fails: {reason(error)}") from error
        found = [
            torch.zeros_like(b) if a is None and b is not None else a for a, b in zip(products, expected, strict=True)
        ]
        most, most_for_single, negligible = bounds_for(request.params)
        overall, worst = errors(found, expected, negligible=negligible, sum_=self._ranks.sum_)
        if not (overall <= most and worst <= most_for_single):
            raise UnusableError(
                f"gathering one module at a time changes H z by {overall:.1%} in norm, {worst:.1%} for one parameter"
            )
        info_once(f"Curvature by one FSDP2 module at a time, within {overall:.1g} of the gathered model")
        return True

    def _gathered_products(self, batch: Any, request: Request) -> tuple[Tensor, list[Tensor | None]]:
        """Return the loss and the products of the gathered model. The products are summed over ranks and sharded."""
        with random_state_kept(self._model), gathered(self._model, request) as whole:
            exact = double_backward(self._model, self._loss_fn, batch, whole, substitutes=SUBSTITUTES)
            pairs = zip(exact.products[0], request.params, strict=True)
            return exact.loss, [None if product is None else sum_to_shard(product, param) for product, param in pairs]

    def _any(self, flag: bool) -> bool:
        return self._ranks.sum_(torch.tensor(float(flag))).item() > 0


class _Group:
    """The parameters that FSDP2 gathers for one module, and their probes. They are whole while the module runs."""

    def __init__(self) -> None:
        self.slots: list[tuple[nn.Module, str, DTensor]] = []
        self.waiting = 0  # the number of missing gradients of parameters and inputs
        self._is_here = False
        self._wholes: dict[DTensor, Tensor] = {}
        self._probes: dict[Tensor, Tensor] = {}
        self._used: dict[Tensor, Tensor] = {}

    @property
    def params(self) -> list[DTensor]:
        return list(dict.fromkeys(param for _, _, param in self.slots))

    def enter(self, of: _Pass) -> None:
        """Gather the parameters, and draw their probes."""
        if self._is_here:
            return
        self._is_here = True
        if not self._used:
            self._create(of)
        with torch.no_grad():
            for tensor in (*self._wholes.values(), *self._probes.values()):
                tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
            # Writing to ``data`` keeps the version counters, which autograd checks for tensors that it has saved.
            for param, whole in self._wholes.items():
                whole.data.copy_(gather_on_mesh(param))
            of.request.draw(of.probe, [z.data for z in self._probes.values()], [*self._probes])
        for module, name, param in self.slots:
            module._parameters[name] = self._used[param]  # type: ignore[assignment]

    def leave(self) -> None:
        """Free the memory of whole tensors, even if autograd has saved the tensors."""
        self._is_here = False
        for module, name, param in self.slots:
            module._parameters[name] = param  # type: ignore[assignment]
        for tensor in (*self._wholes.values(), *self._probes.values()):
            tensor.untyped_storage().resize_(0)

    def received(self, of: _Pass) -> None:
        """Count a gradient, and free the memory after the last one."""
        if of.is_backward:  # loss_fn may compute gradients itself
            self.waiting -= 1
            if self.waiting == 0:
                self.leave()

    def close(self) -> None:
        """Free all tensors. The graph refers to this group, so a reference to the graph would create a cycle."""
        self.leave()
        for tensors in (self._wholes, self._probes, self._used):
            tensors.clear()

    def _create(self, of: _Pass) -> None:
        for param in self.params:
            device = param.device_mesh.device_type
            whole = self._used[param] = self._wholes[param] = torch.empty(param.shape, dtype=param.dtype, device=device)
            whole.untyped_storage().resize_(0)
            if (number := of.numbers.get(param)) is None:
                continue
            self.waiting += 1
            probe = self._probes[param] = torch.empty_like(whole)
            probe.untyped_storage().resize_(0)
            # Create the node when the module first runs, because autograd runs the latest nodes first.
            tracked: Tensor = _Whole.apply(  # type: ignore[no-untyped-call]
                of.root, whole, partial(of.receive, number, self)
            )
            self._used[param] = forward_ad.make_dual(tracked, probe)


class _Pass:
    """Computation of H z for one probe."""

    def __init__(self, model: nn.Module, request: Request, probe: int, weight: float, needs_marks: bool) -> None:
        self.request, self.probe = request, probe
        self.numbers = {param: number for number, param in enumerate(request.params)}
        self.root = torch.zeros((), requires_grad=True)
        self._model, self._weight, self._needs_marks = model, weight, needs_marks
        self._groups = _groups_of(model)
        self.is_backward = False
        self._products: list[Tensor | None] = [None] * len(request.params)
        self._marks: list[Tensor | None] = [None] * len(request.params)

    def run(
        self, loss_fn: Callable[..., Tensor], batch: Any
    ) -> tuple[Tensor, list[Tensor | None], list[Tensor | None]]:
        """Return the loss, the products and the marks."""
        with ExitStack() as stack:
            stack.enter_context(isolated(self._model, FORWARD_SUBSTITUTES, self.request.params))
            stack.enter_context(hooks_replaced(self._model, self._enter, self._leave))
            stack.enter_context(plain_attention())
            stack.enter_context(forward_ad.dual_level())
            stack.enter_context(torch.enable_grad())
            for group in self._groups.values():
                stack.callback(group.close)
            loss: Tensor = forward_ad.unpack_dual(loss_fn(self._model, batch)).primal
            self.is_backward = True
            try:
                torch.autograd.grad(loss, self.root)
            except RuntimeError as error:
                raise explain(error) from error
            return loss.detach(), self._products, self._marks

    def receive(self, number: int, group: _Group, gradient: Tensor) -> None:
        """Reduce-scatter the gradient of a whole parameter."""
        primal, tangent = forward_ad.unpack_dual(gradient)
        self._products[number] = self._reduced(number, primal, tangent)
        if self._needs_marks:
            self._marks[number] = self._reduced(number, primal, primal.abs())
        group.received(self)

    def _reduced(self, number: int, like: Tensor, tensor: Tensor | None) -> Tensor:
        """Return this rank's shard of the weighted sum over ranks, in float32 or wider. None stands for zeros."""
        wide = like.new_zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32))
        if tensor is not None and self._weight > 0:  # a batch of weight 0 may contain NaN
            wide.add_(tensor, alpha=self._weight)
        return sum_to_shard(wide, self.request.params[number])

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        group = self._groups[module]
        group.enter(self)
        inputs: list[Tensor] = []

        def watch(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            inputs.append(tensor.view_as(tensor))  # a view has no gradient from outside the module
            return inputs[-1]

        if self.is_backward:  # activation checkpointing runs the module again
            return args, kwargs
        args, kwargs = map_tensors(watch, (args, kwargs))
        group.waiting += 1
        if inputs:
            register_multi_grad_hook(inputs, lambda _: group.received(self))
        return args, kwargs

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        group = self._groups[module]

        def watch(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: group.enter(self))
            return tensor

        if not self.is_backward:
            map_tensors(watch, output)
            if module is not self._model:  # the backward pass begins with the model itself
                group.leave()


class _Whole(torch.autograd.Function):
    """A whole parameter that passes its complete gradient to a function."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, whole: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        ctx.receive = receive
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.receive(gradient)
        return torch.zeros(()), None, None


def _groups_of(model: nn.Module) -> dict[nn.Module, _Group]:
    """Return the parameters of each FSDP2 module. Raise an UnusableError if modules share a parameter."""
    fsdp: Any = sys.modules["torch.distributed.fsdp"]
    groups: dict[nn.Module, _Group] = {}
    owners: dict[Tensor, _Group] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, group: _Group | None) -> None:
        if module in seen:
            return
        seen.add(module)
        if isinstance(module, fsdp.FSDPModule):
            group = groups[module] = _Group()
        for name, param in module._parameters.items():
            if group is not None and param is not None and is_sharded(param):
                group.slots.append((module, name, param))
                if owners.setdefault(param, group) is not group:
                    raise UnusableError("FSDP2 modules share a parameter")
        for child in module.children():
            visit(child, group)

    visit(model, None)
    return groups


def _fits(params: Sequence[Tensor]) -> bool:
    """Return whether this device has enough memory for the comparison with the gathered model."""
    needed = _COPIES_TO_COMPARE * sum(param.numel() * param.itemsize for param in params)
    module: Any = torch.get_device_module(next(p.device_mesh.device_type for p in params if is_sharded(p)))
    if not hasattr(module, "mem_get_info"):
        return True
    return bool(needed < module.mem_get_info()[0] + module.memory_reserved() - module.memory_allocated())
