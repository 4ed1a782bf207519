"""The optimizer that users hold: arguments, groups, step, state dict."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from adahessian.algorithm.options import validate
from adahessian.algorithm.plan import Measurement, Plan, parameters_of
from adahessian.algorithm.shapes import AveragingName, CurvatureShape
from adahessian.algorithm.sparse import check_sparse_group, step_sparse
from adahessian.algorithm.state import CURVATURE_KEYS, Group, State, curvature_dtype, shape_of, state_problem
from adahessian.base.dtypes import accumulation_dtype
from adahessian.base.errors import CurvatureError
from adahessian.base.shards import check_placement
from adahessian.hessian.double_backward import Request, products_of, reject_sparse
from adahessian.hessian.graph import check_twice_differentiable
from adahessian.hessian.isolation import hooks_silenced
from adahessian.loss_scale import calling_scaler, scale_of
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

    The defaults are Algorithm 1 of the paper, with the curvature measured at every step. The curvature comes in by one
    of three ways, which give the same update:

    1. :class:`adahessian.Curvature` measures it in a pass of its own, apart from the gradient (recommended);
    2. ``loss.backward(create_graph=optimizer.curvature_due)``, then ``optimizer.step()``, which frees the graph;
    3. ``optimizer.step(closure)``, where the closure calls ``backward`` as in 2.

    Every argument can be set per parameter group. One measurement serves all groups: it is due as soon as any group
    wants one, and takes the largest ``num_probes``. Groups with ``sparse=True`` hold embedding tables with sparse
    gradients and are updated by Adagrad; :func:`adahessian.param_groups` makes them.

    Args:
        params: Parameters, named parameters or groups.
        lr: Learning rate :math:`\eta`, a float or a tensor of one element.
        betas: Decay :math:`\beta_1` of the gradient momentum and :math:`\beta_2` of the Hessian momentum, the latter
            per measurement.
        eps: Added to the denominator. It is on the scale of the loss.
        weight_decay: Decoupled weight decay :math:`\lambda`, as in AdamW.
        hessian_power: Hessian power :math:`k`, from 0 (gradient descent with momentum) to 1.
        block_size: Number of consecutive elements of a row that share one curvature. A row's last block may be shorter.
        averaging: ``"kernel"`` averages over all dimensions after the second, ``"row"`` over ``block_size`` elements
            of a row, ``"none"`` not at all. ``"auto"`` takes four and five dimensions for kernels and everything else
            for rows. ``"factored"`` keeps mean squares of rows and columns, which needs little memory. Vectors and
            scalars are never averaged.
        signed: Average :math:`D` (the paper's equation) instead of :math:`|D|` (the authors' code, to which the
            paper's learning rates belong).
        num_probes: Number of Hessian-vector products per measurement. They are averaged before magnitudes are taken.
        curvature_every: Number of steps from one measurement to the next.
        curvature_warmup: Number of initial steps that always measure.
        steady_start: Average the square of the first measurement with its mean over the tensor. A single probe is close
            to zero for some elements, which would make the first steps far too long.
        seed: Seed of the probes. No random generator is read or advanced.
        maximize: Maximize the objective instead of minimizing it.
        capturable: Keep the step count on the device, so that an ordinary step can be captured in a CUDA graph. Replays
            do not count towards ``curvature_every``.
        fused: Update all tensors of a group with one Triton kernel, and measure with kernels too. None does so on CUDA
            wherever it is possible.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = AdaHessian(model.parameters(), lr=0.15)
        >>> loss = model(torch.ones(8, 3)).square().mean()
        >>> loss.backward(create_graph=optimizer.curvature_due)
        >>> optimizer.step()
    """

    # timm's training script asks this once, and then calls backward(create_graph=True) at every step.
    is_second_order = True

    _measurement: Measurement | None  # the newest one, until a step uses it
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
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "hessian_power": hessian_power,
            "block_size": block_size,
            "averaging": averaging,
            "signed": signed,
            "num_probes": num_probes,
            "curvature_every": curvature_every,
            "curvature_warmup": curvature_warmup,
            "steady_start": steady_start,
            "seed": seed,
            "maximize": maximize,
            "capturable": capturable,
            "fused": fused,
            "sparse": False,
            # Counts, not options. They are in the groups because every kind of checkpoint keeps those: steps taken,
            # measurements used, and steps that the newest measurement has served.
            "steps": 0,
            "measurements": 0,
            "staleness": 0,
        }
        validate(defaults)
        self._forget_transients()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. It is measured, with all others, at the next step.

        Raises:
            ValueError: If an option of the group is out of its range.
        """
        if isinstance(param_group, dict):
            validate({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                check_placement(param)
        except ValueError:
            self.param_groups.pop()
            raise
        self._measurement = None  # without the new group

    # The curvature comes in ------------------------------------------------------------------------------------------

    @property
    def curvature_due(self) -> bool:
        """Whether the next step wants a measurement that it does not have yet."""
        return self._measurement is None and any(map(_is_due, self._measured_groups()))

    @torch.no_grad()
    def set_curvature(
        self, diagonal: Mapping[Tensor, Tensor], gradients: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        """Hand over a Hessian diagonal of your own, for the next step to use.

        Args:
            diagonal: For each parameter a tensor of its shape. For a sharded parameter it is the whole tensor or one
                that is sharded alike, and the same on all ranks. Leave out parameters that took no part in the loss.
            gradients: For each of these parameters the gradient of the same loss. A block whose gradient and diagonal
                are all zero, such as the embedding of a word that did not occur, takes no step until it has been
                measured. Without gradients every block counts as measured.

        Raises:
            TypeError: If ``diagonal`` is not a mapping.
            ValueError: If a parameter is not this optimizer's, or a tensor does not have the shape of its parameter.
        """
        if not isinstance(diagonal, Mapping):
            raise TypeError(f"diagonal is a {type(diagonal).__name__}. Pass a dict from parameters to tensors.")
        own = {param for param, _, _ in parameters_of(self.param_groups)}
        for param, values in diagonal.items():
            if param not in own:
                raise ValueError(
                    "diagonal has a key that is not a parameter of this optimizer. Use those in its param_groups."
                )
            _check_like("diagonal", param, values)
            if gradients is not None:
                _check_like("gradients", param, gradients.get(param))
        products = [values.to(accumulation_dtype(param.dtype)) for param, values in diagonal.items()]
        self._accept([*diagonal], None, [products], None if gradients is None else [gradients[p] for p in diagonal])

    def _begin_measurement(self) -> Request:
        """All that a Hessian-vector product may know of this optimizer."""
        groups = self._measured_groups()
        params = [param for group in groups for param in group["params"] if param.requires_grad]
        num_probes = max((int(group["num_probes"]) for group in groups), default=1)

        @torch.no_grad()
        def draw(probe: int, out: Sequence[Tensor] | None = None) -> list[Tensor]:
            # Lazy parameters have a shape by now, because the loss has been computed.
            self._plan.refresh(self.param_groups, self.state)
            return self._plan.draw(params, probe, out)

        return Request(params, num_probes, draw)

    @torch.no_grad()
    def _accept(
        self,
        params: Sequence[Tensor],
        probes: Sequence[Sequence[Tensor]] | None,
        products: Sequence[Sequence[Tensor | None]],
        gradients: Sequence[Tensor | None] | None,
    ) -> None:
        """Keep a measurement for the next step, in place of an earlier one for this step.

        ``probes`` and ``products`` have one list per probe in the order of ``params``. Probes of None stand for ones, a
        product of None belongs to a parameter that took no part in the loss.
        """
        self._plan.refresh(self.param_groups, self.state)
        self._measurement = self._plan.reduce(params, probes, products, gradients)

    def _shapes(self, params: Sequence[Tensor]) -> list[CurvatureShape]:
        """The shapes of the curvature of these parameters, whole ones where they are sharded."""
        groups = {param: group for param, group, _ in parameters_of(self.param_groups)}
        return [shape_of(param, groups[param]) for param in params]

    def _measured_groups(self) -> list[Group]:
        return [group for group in self.param_groups if not group["sparse"]]

    # The step --------------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step of Algorithm 1.

        Gradients that carry their graph (``backward(create_graph=True)``) are differentiated once more if a measurement
        is due, and their graph is freed. A closure evaluates the model, calls ``backward`` and returns the loss.

        Raises:
            CurvatureError: If no curvature was ever measured, or an operation cannot be differentiated twice.
            RuntimeError: If a gradient is sparse, or a state does not fit its parameter.
        """
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        # Everything that can fail comes before the first change.
        self._check_gradients()
        self._measure_from_graph()
        self._warn_if_overdue()
        ready = {id(group) for group in self._measured_groups() if self._is_ready(group)}
        self._plan.refresh(self.param_groups, self.state)

        measurement = self._measurement
        self._plan.step(ready, measurement or {})
        if ready:
            self._measurement = None
        for group in self.param_groups:
            if group["sparse"]:
                step_sparse(group, self.state)
            elif id(group) in ready:
                _count_step(group, measured=measurement is not None)
        return loss

    def _check_gradients(self) -> None:
        for group in self.param_groups:
            if group["sparse"]:
                check_sparse_group(group)
                continue
            for param in group["params"]:
                if param.grad is not None and param.grad.layout is not torch.strided:
                    reject_sparse(param.grad)

    def _measure_from_graph(self) -> None:
        """Measure in the classic loop, from gradients that carry their graph."""
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        with_graph = [param for param in params if param.grad.requires_grad]
        if with_graph and self.curvature_due:
            check_single_process()
            gradients = [param.grad for param in with_graph]
            check_twice_differentiable(gradients)
            request = self._begin_measurement()
            of_params = [param.grad for param in request.params]
            with hooks_silenced(request.params):
                probes, products = products_of(of_params, request.params, request.draw, request.num_probes)
            if (scaler := calling_scaler()) is not None:
                # Not in place, because autograd may return one tensor for two parameters.
                scale = scale_of(scaler, with_graph[0].device)
                products = [[p if p is None else p / scale.to(p.device) for p in each] for each in products]
            self._accept(request.params, probes, products, of_params)
        for param in with_graph:
            # A gradient with a graph keeps its parameter alive, which keeps its gradient alive: a cycle.
            param.grad = param.grad.detach()

    def _warn_if_overdue(self) -> None:
        if self._measurement is not None or self._overdue_warned:
            return
        overdue = next(filter(_is_overdue, self._measured_groups()), None)
        if overdue is not None:
            self._overdue_warned = True
            warnings.warn(
                f"The curvature is {overdue['staleness']} steps old, but curvature_every={overdue['curvature_every']}. "
                "Call curvature.measure(batch) before each step, or "
                "loss.backward(create_graph=optimizer.curvature_due).",
                stacklevel=5,  # past step and the two wrappers that torch puts around it
            )

    def _is_ready(self, group: Group) -> bool:
        """Whether a group can step. One that was never measured can be asked to only if nothing would move."""
        gradients = [param.grad for param in group["params"] if param.grad is not None]
        if group["measurements"] or not gradients:
            return True
        # Checkpoint libraries make the state of a fresh optimizer by a step with zero gradients, lr=0 or both.
        stands_still = group["lr"] == 0
        if self._measurement is not None:
            return not (stands_still and _are_zero(gradients))
        if stands_still or _are_zero(gradients):
            return False
        raise CurvatureError(
            "step() found no curvature, because none has been measured yet. Before optimizer.step(), call "
            "curvature.measure(batch), where curvature = adahessian.Curvature(model, loss_fn, optimizer), or replace "
            "loss.backward() by loss.backward(create_graph=optimizer.curvature_due). For trainers, see "
            "adahessian.integrations."
        )

    # The state -------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the optimizer's state. Averages and counts keep their own dtype.

        Raises:
            ValueError: If it is another optimizer's state, or does not fit the parameters. Nothing is loaded then.
        """
        loaded: StateDict = {}

        def check(_: Optimizer, incoming: StateDict) -> None:
            if any(not {"hessian_power", "curvature_every"} <= group.keys() for group in incoming["param_groups"]):
                raise ValueError("state_dict is another optimizer's state. Load one that AdaHessian has saved.")
            for own, saved in zip(self.param_groups, incoming["param_groups"], strict=False):
                if own["sparse"] != saved.get("sparse", False):
                    raise ValueError("state_dict has other groups with sparse=True. Make the same groups as before.")
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
                    # A copy, because the other optimizer may go on counting.
                    device = param.device if group["capturable"] else "cpu"
                    self.state[param]["step"] = state["step"].clone().to(device)

        # The last to see what comes in, after all other hooks, and the first to see what has been loaded.
        handles = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(restore_dtypes, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _match(self, state_dict: StateDict) -> Iterator[tuple[Tensor, Group, State]]:
        """Each parameter with the group and the state that a state dict has for it."""
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
        self._dropped_seen = 0  # by diagnose


def _is_due(group: Group) -> bool:
    """Whether the next step wants a measurement: the first step, all of the warm-up, then every so many."""
    return bool(
        group["measurements"] == 0
        or group["steps"] < group["curvature_warmup"]
        or group["staleness"] >= group["curvature_every"]
    )


def _is_overdue(group: Group) -> bool:
    """Whether a measurement that was due has been missing for more than two intervals."""
    return bool(group["measurements"] > 0 and group["staleness"] > 3 * group["curvature_every"])


def _count_step(group: Group, *, measured: bool) -> None:
    group["steps"] += 1
    group["measurements"] += measured
    group["staleness"] = 1 if measured else group["staleness"] + 1


def _are_zero(gradients: Sequence[Tensor]) -> bool:
    return not any(bool(gradient.any()) for gradient in gradients)  # waits for the device


def _check_like(what: str, param: Tensor, tensor: object) -> None:
    found = f"a {type(tensor).__name__}"
    if isinstance(tensor, Tensor):
        found = f"shape {tuple(tensor.shape)} on {tensor.device}"
    wanted = f"shape {tuple(param.shape)} on {param.device}"
    if found != wanted:
        raise ValueError(f"{what}: a parameter of {wanted} was given {found}. Pass a tensor like the parameter.")
