"""The AdaHessian optimizer: arguments, parameter groups, step and state dict."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from adahessian.algorithm.options import validate
from adahessian.algorithm.plan import Lists, Measurement, Plan, draw_some, parameters_of
from adahessian.algorithm.shapes import AveragingName, CurvatureShape
from adahessian.algorithm.sparse import step_sparse
from adahessian.algorithm.state import CURVATURE_KEYS, Group, State, curvature_dtype, shape_of, state_problem
from adahessian.base.errors import CurvatureError
from adahessian.base.precision import autocast_disabled
from adahessian.base.shards import check_placement
from adahessian.hessian.double_backward import Request, products_of, reject_sparse
from adahessian.hessian.graph import check_twice_differentiable
from adahessian.hessian.isolation import hooks_silenced
from adahessian.loss_scale import calling_scaler
from adahessian.parallel.ranks import check_single_process


class AdaHessian(Optimizer):
    r"""AdaHessian: Adam with the curvature of the loss in place of the squared gradient.

    .. math::
        D_t &= z \odot (H_t z), \quad z \text{ Rademacher} && \text{Hutchinson's diagonal} \\
        D_t^{(s)} &= \text{mean of } |D_t| \text{ over each block} && \text{spatial averaging} \\
        \bar D_t &= \sqrt{\frac{(1 - \beta_2) \sum_i \beta_2^{t-i} D_i^{(s)} D_i^{(s)}}{1 - \beta_2^t}}
            && \text{Hessian momentum} \\
        m_t &= \frac{(1 - \beta_1) \sum_i \beta_1^{t-i} g_i}{1 - \beta_1^t} && \text{gradient momentum} \\
        \theta_t &= \theta_{t-1} - \eta \, \big( m_t / (\bar D_t^{\,k} + \epsilon) + \lambda \theta_{t-1} \big)
            && \text{step, decoupled weight decay}

    The defaults are Algorithm 1 of the paper, with the curvature measured at every step. There are three ways to
    measure it. On the same batch, all three give the same update:

    1. :class:`adahessian.Curvature` measures the curvature in a separate pass (recommended).
    2. ``loss.backward(create_graph=optimizer.curvature_due)`` keeps the graph for ``optimizer.step()``, which frees it.
    3. ``optimizer.step(closure)`` runs a closure that calls ``backward`` as in 2.

    :func:`adahessian.attach` does 1 or 2 when the loop calls the model.

    Every argument can be set per parameter group. One measurement serves all groups. It is due as soon as any group
    needs one, and it uses the largest ``num_probes``. Groups with ``sparse=True`` hold embedding tables with sparse
    gradients, and Adagrad updates them. :func:`adahessian.param_groups` creates such groups.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr: Learning rate :math:`\eta`, a float or a one-element tensor.
        betas: Decay rates :math:`\beta_1` of the gradient momentum, per step, and :math:`\beta_2` of the Hessian
            momentum, per measurement.
        eps: Constant added to the denominator, on the scale of the loss.
        weight_decay: Decoupled weight decay :math:`\lambda`, as in AdamW.
        hessian_power: Hessian power :math:`k`, from 0 (gradient descent with momentum) to 1.
        block_size: Number of consecutive elements of a row that share one value. A row's last block may be shorter.
        averaging: ``"kernel"`` averages over all dimensions after the second, ``"row"`` averages over ``block_size``
            elements of a row, and ``"none"`` does not average. ``"auto"`` treats tensors with four or five dimensions
            as kernels and all others as rows. ``"factored"`` stores mean squares per row and per column, which needs
            little memory. Vectors and scalars are never averaged.
        signed: Average :math:`D`, as in the paper's equation, instead of :math:`|D|`, as in the authors' code. The
            paper's learning rates are for :math:`|D|`.
        num_probes: Number of Hessian-vector products per measurement. They are averaged before magnitudes are taken.
        curvature_every: Number of steps from one measurement to the next.
        curvature_warmup: Number of initial steps that always measure.
        steady_start: Average the square of the first measurement with its mean over the tensor. An estimate from one
            probe is close to zero for some elements, which would make the first steps far too long.
        seed: Seed of the probes. Random generators are neither read nor advanced.
        maximize: Maximize the objective instead of minimizing it.
        capturable: Keep the step count on the device, so that an ordinary step can be captured in a CUDA graph. Replays
            do not count towards ``curvature_every``.
        fused: Use Triton kernels for updates and measurements, with one launch for all tensors of a group. None uses
            them on CUDA wherever possible.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = AdaHessian(model.parameters(), lr=0.15)
        >>> loss = model(torch.ones(8, 3)).square().mean()
        >>> loss.backward(create_graph=optimizer.curvature_due)
        >>> optimizer.step()
    """

    # If True, timm's training script calls backward(create_graph=True) at every step.
    is_second_order = True
    default_batch_fraction = 1.0  # of Curvature
    needs_marks = True  # marks from the gradient, of blocks that a loss reached although their products are zero

    _measurement: Measurement | None  # the newest measurement, until a step uses it
    _overdue_warned: bool

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.15,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        *,
        hessian_power: float = 1.0,
        block_size: int = 1,
        averaging: AveragingName = "auto",
        signed: bool = False,
        num_probes: int = 1,
        curvature_every: int = 1,
        curvature_warmup: int = 0,
        steady_start: bool = False,
        seed: int = 0,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options |= {"hessian_power": hessian_power, "block_size": block_size, "averaging": averaging, "signed": signed}
        options |= {"num_probes": num_probes, "curvature_every": curvature_every, "curvature_warmup": curvature_warmup}
        options |= {"steady_start": steady_start, "seed": seed, "maximize": maximize}
        self._start(params, {**options, "capturable": capturable, "fused": fused})

    def _start(self, params: ParamsT, options: dict[str, Any]) -> None:
        # Counts, not options: steps taken, measurements used, and steps taken with the newest measurement. They are in
        # the groups because every kind of checkpoint saves the groups.
        defaults = {**options, "sparse": False, "steps": 0, "measurements": 0, "staleness": 0}
        validate(defaults)
        self._forget_transients()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, or raise a ValueError if an option is invalid. The next step measures all groups."""
        if isinstance(param_group, dict):
            validate({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                check_placement(param)
        except ValueError:
            self.param_groups.pop()
            raise
        self._measurement = None  # it lacks the new group

    @property
    def curvature_due(self) -> bool:
        """Whether the next step still needs a measurement."""
        return self._measurement is None and any(
            group["measurements"] == 0
            or group["steps"] < group["curvature_warmup"]
            or group["staleness"] >= group["curvature_every"]
            for group in self._measured_groups()
        )

    @torch.no_grad()
    def set_curvature(
        self, diagonal: Mapping[Tensor, Tensor], gradients: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        """Set a Hessian diagonal of your own for the next step to use.

        Args:
            diagonal: Maps each parameter to a tensor of its shape, the same on all ranks. For a sharded parameter, the
                tensor may be whole or sharded alike. Leave out parameters that took no part in the loss.
            gradients: Maps each of these parameters to its gradient of the same loss. If the gradient and the diagonal
                of a block are all zero, as for the embedding of a word that did not occur, the block takes no step
                until it is measured. Without gradients, every block counts as measured.

        Raises:
            TypeError: If ``diagonal`` is not a mapping, or this is an AdaHessianKron.
            ValueError: If a parameter does not belong to this optimizer, or a tensor does not have its shape.
        """
        if "damping" in self.defaults:
            raise TypeError("diagonal cannot be used by AdaHessianKron. Measure with adahessian.Curvature.")
        if not isinstance(diagonal, Mapping):
            raise TypeError(f"diagonal is a {type(diagonal).__name__}. Pass a dict that maps parameters to tensors.")
        own = {param for param, _, _ in parameters_of(self.param_groups)}
        for param, values in diagonal.items():
            if param not in own:
                raise ValueError("diagonal has a key that is not a parameter of this optimizer. Leave it out.")
            _check_like("diagonal", param, values)
            if gradients is not None:
                _check_like("gradients", param, gradients.get(param))
        products = [values.to(torch.promote_types(param.dtype, torch.float32)) for param, values in diagonal.items()]
        self._accept([*diagonal], None, [products], None if gradients is None else [gradients[p] for p in diagonal])

    def _begin_measurement(self) -> Request:
        """Return what a Hessian-vector product needs from this optimizer."""
        groups = self._measured_groups()
        params = [param for group in groups for param in group["params"] if param.requires_grad]
        num_probes = max((int(group["num_probes"]) for group in groups), default=1)

        @torch.no_grad()
        def draw(probe: int, out: Sequence[Tensor] | None = None, only: Sequence[Tensor] | None = None) -> list[Tensor]:
            if only is not None:
                return draw_some(groups, only, probe, out)
            # Lazy parameters have a shape by now, because the loss has been computed.
            self._plan.refresh(self.param_groups, self.state)
            return self._plan.draw(params, probe, out)

        return Request(params, num_probes, draw)

    @torch.no_grad()
    def _accept(
        self, params: Sequence[Tensor], probes: Lists | None, products: Lists, gradients: Sequence[Any] | None
    ) -> None:
        """Keep a measurement for the next step. It replaces an earlier measurement for the same step.

        ``probes`` and ``products`` have one list per probe, in the order of ``params``. ``probes=None`` means probes of
        all ones. A product of None marks a parameter that took no part in the loss.
        """
        self._plan.refresh(self.param_groups, self.state)
        with autocast_disabled():
            self._measurement = self._plan.reduce(params, probes, products, gradients)

    def _shapes(self, params: Sequence[Tensor]) -> list[CurvatureShape]:
        """Return the curvature shapes of these parameters. Sharded parameters count as whole."""
        groups = {param: group for param, group, _ in parameters_of(self.param_groups)}
        return [shape_of(param, groups[param]) for param in params]

    def _measured_groups(self) -> list[Group]:
        return [group for group in self.param_groups if not group["sparse"]]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step of Algorithm 1.

        If a measurement is due, gradients with a graph (``backward(create_graph=True)``) are differentiated once more.
        Their graph is freed. A closure must evaluate the model, call ``backward`` and return the loss.

        Raises:
            CurvatureError: If no curvature has been measured, or an operation cannot be differentiated twice.
            RuntimeError: If a gradient is sparse, or a state does not fit its parameter.
        """
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        # Everything that can fail runs before anything changes.
        for group in self.param_groups:
            _check_gradients(group)
        self._measure_from_graph()
        self._warn_if_overdue()
        ready = {id(group) for group in self._measured_groups() if self._is_ready(group)}
        self._plan.refresh(self.param_groups, self.state)

        is_measured, is_folded = self._measurement is not None, bool(self._measurement)
        with autocast_disabled():
            self._plan.step(ready, self._measurement or {})
        if ready:
            self._measurement = None
        for group in self.param_groups:
            if group["sparse"]:
                step_sparse(group, self.state)
            elif id(group) in ready:
                group["steps"] += 1
                group["measurements"] += is_folded  # not if memory ran out
                group["staleness"] = 1 if is_measured else group["staleness"] + 1
        return loss

    def _measure_from_graph(self) -> None:
        """Measure the curvature in the classic loop, from gradients with a graph."""
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        with_graph = [param for param in params if param.grad.requires_grad]
        if with_graph and self.curvature_due:
            check_single_process()
            check_twice_differentiable([param.grad for param in with_graph])
            request = self._begin_measurement()
            of_params = [param.grad for param in request.params]
            with hooks_silenced(request.params):
                probes, products = products_of(of_params, request)
            if (scaler := calling_scaler()) is not None:
                # Not in place, because autograd may return the same tensor for two parameters.
                scale = scaler.scale(torch.ones((), device=with_graph[0].device))  # unlike get_scale, without a sync
                products = [[p if p is None else p / scale.to(p.device) for p in each] for each in products]
            self._accept(request.params, probes, products, of_params)
        for param in with_graph:
            # A gradient with a graph and its parameter would keep each other alive.
            param.grad = param.grad.detach()

    def _warn_if_overdue(self) -> None:
        for group in self._measured_groups() if self._measurement is None and not self._overdue_warned else ():
            every, age = group["curvature_every"], group["staleness"]
            if group["measurements"] and age > 3 * every:  # a due measurement has been missing for two intervals
                self._overdue_warned = True
                warnings.warn(
                    f"The curvature is {age} steps old, but curvature_every={every}. Before each step, call "
                    "curvature.measure(batch) or loss.backward(create_graph=optimizer.curvature_due).",
                    stacklevel=5,  # skips step and the two wrappers that PyTorch adds to it
                )
                return

    def _is_ready(self, group: Group) -> bool:
        """Return whether a group can step. Without any measurement, raise unless the step would move nothing."""
        gradients = [param.grad for param in group["params"] if param.grad is not None]
        if group["measurements"] or not gradients:
            return True
        # Checkpoint libraries create the state of a new optimizer by a step with zero gradients, lr=0 or both.
        stands_still = group["lr"] == 0
        if self._measurement is not None:
            return not (stands_still and _are_zero(gradients))
        if stands_still or _are_zero(gradients):
            return False
        raise CurvatureError(
            "step() has no curvature to use, because none has been measured yet. Create curvature = "
            "adahessian.Curvature(model, loss_fn, optimizer) and call curvature.measure(batch) before "
            "optimizer.step(), or replace loss.backward() with loss.backward(create_graph=optimizer.curvature_due) "
            "(in a trainer, use adahessian.integrations)."
        )

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state dict. Curvature averages and counts keep their own dtype.

        Raises:
            ValueError: If ``state_dict`` is from another optimizer or does not fit. Nothing is loaded in that case.
        """
        loaded: StateDict = {}

        def check(_: Optimizer, incoming: StateDict) -> None:
            required = self.defaults.keys() & {"hessian_power", "curvature_every", "damping"}
            names = [group.keys() for group in incoming["param_groups"]]
            if any(not required <= each or "damping" in each - required for each in names):
                raise ValueError(f"state_dict is from another optimizer. Load one that {type(self).__name__} saved.")
            for own, saved in zip(self.param_groups, incoming["param_groups"], strict=False):
                if own["sparse"] != saved.get("sparse", False):
                    raise ValueError("state_dict has sparse=True in different groups. Create the same groups again.")
            for param, group, state in self._match(incoming):
                if (problem := state_problem(state, param, group)) is not None:
                    raise ValueError(problem)
            loaded.update(incoming)

        def restore_dtypes(_: Optimizer) -> None:
            for param, group, state in self._match(loaded):
                for key in CURVATURE_KEYS:
                    if key in state:
                        self.state[param][key] = state[key].to(dtype=curvature_dtype(param), device=param.device)
                if isinstance(state.get("step"), Tensor):
                    # A copy, because the other optimizer may keep counting.
                    device = param.device if group["capturable"] else "cpu"
                    self.state[param]["step"] = state["step"].clone().to(device)

        # check runs after all other pre-hooks, and restore_dtypes runs before all other post-hooks.
        last = self.register_load_state_dict_pre_hook(check)
        first = self.register_load_state_dict_post_hook(restore_dtypes, prepend=True)
        with last, first:
            super().load_state_dict(state_dict)

    def _match(self, state_dict: StateDict) -> Iterator[tuple[Tensor, Group, State]]:
        """Iterate over the parameters, each with its group and state from a state dict."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            for param, key in zip(group["params"], saved["params"], strict=False):
                if key in state_dict["state"]:
                    yield param, {**group, **saved}, state_dict["state"][key]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_transients()
        for group in self.param_groups:
            for name, default in self.defaults.items():
                if name != "differentiable":  # torch adds it to the defaults of every optimizer
                    group.setdefault(name, default)

    def _forget_transients(self) -> None:
        self._measurement = None
        self._plan = Plan()
        self._overdue_warned = False
        self._dropped_seen = 0  # set by diagnose


def _check_gradients(group: Group) -> None:
    """Raise a RuntimeError if a sparse gradient is in a group without ``sparse=True`` or with weight decay."""
    for param in group["params"]:
        if param.grad is not None and param.grad.is_sparse:
            if not group["sparse"]:
                reject_sparse(param.grad)
            if group["weight_decay"]:
                raise RuntimeError(
                    f"weight_decay={group['weight_decay']} cannot be applied to a sparse gradient of a parameter of "
                    f"shape {tuple(param.shape)}. Set weight_decay=0 in its group."
                )


def _are_zero(gradients: Sequence[Tensor]) -> bool:
    return not any(bool(gradient.any()) for gradient in gradients)  # synchronizes


def _check_like(what: str, param: Tensor, tensor: object) -> None:
    found = f"a {type(tensor).__name__}"
    if isinstance(tensor, Tensor):
        found = f"shape {tuple(tensor.shape)} on {tensor.device}"
    wanted = f"shape {tuple(param.shape)} on {param.device}"
    if found != wanted:
        raise ValueError(f"{what} has {found} for a parameter of {wanted}. Pass a tensor like the parameter.")
