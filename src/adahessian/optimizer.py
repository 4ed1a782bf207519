"""The optimizer that users hold: arguments, groups, state, step."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from adahessian import state as states
from adahessian.averaging import Averaging, Blocks, Estimate, Layout, steadied
from adahessian.curvature.errors import CurvatureError
from adahessian.curvature.graph import check_twice_differentiable
from adahessian.curvature.hutchinson import as_reals, hessian_diagonal, refuse_sparse
from adahessian.curvature.loss_scale import calling_scaler, scale_of
from adahessian.curvature.schedule import count_step, is_due, is_long_overdue
from adahessian.distributed import refuse_several_processes
from adahessian.fused import FusedTensors, Fusion, Member
from adahessian.measuring import Measuring
from adahessian.settings import Beta2Per, validate
from adahessian.sharding import agreed, local, over_ranks, refuse_cut_blocks
from adahessian.state import Group, State
from adahessian.stepping import Stepping, picked
from adahessian.update import update_hessian_rms, update_parameters

Measurement = dict[Tensor, Estimate]

_LAYOUT = operator.attrgetter("layout")


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
    3. ``optimizer.step(closure)``, the closure calling ``backward`` as in 2.

    Every argument can be set per parameter group. One measurement serves all groups: it is due as soon as any group
    wants one, and takes the largest ``num_probes``.

    Args:
        params: Parameters, named parameters or groups; :func:`adahessian.param_groups` makes groups of a model.
        lr: Learning rate :math:`\eta`, a float or a tensor of one element.
        betas: Decay :math:`\beta_1` of the gradient momentum and :math:`\beta_2` of the Hessian momentum.
        eps: Added to the denominator. It is on the scale of the loss.
        weight_decay: Decoupled weight decay :math:`\lambda`, as in AdamW.
        hessian_power: Hessian power :math:`k`, from 0 (gradient descent with momentum) to 1.
        block_size: Consecutive elements of a row that share one curvature; a row's last block may be shorter.
        blocks: ``"kernel"`` averages over all dimensions after the second, ``"row"`` over ``block_size`` elements of a
            row, ``"none"`` not at all; ``"auto"`` takes tensors of three and more dimensions for kernels, matrices for
            rows. Vectors and scalars are never averaged.
        averaging: ``"magnitude"`` averages :math:`|D|` over a block (the authors' code, to which the paper's learning
            rates belong), ``"signed"`` averages :math:`D` (the paper's equation).
        num_probes: Hessian-vector products a measurement, whose signed mean counts.
        update_every: Steps from one measurement to the next.
        warmup_steps: First steps that all measure, whatever ``update_every`` says.
        beta2_per: Whether :math:`\beta_2` decays the Hessian momentum once a ``"measurement"`` or once a ``"step"``;
            in the latter case a measurement after n steps decays it by :math:`\beta_2^n`.
        steady_start: Whether the first measurement counts for half, and its mean over the tensor for the other:
            :math:`D_1^2 \leftarrow (D_1^2 + \overline{D_1^2}) / 2`, the mean being over the tensor's blocks. Single
            probes come out near zero here and there, and the first steps, with no other measurement to lean on, are
            far too long there. From then on it is one measurement among many.
        seed: Seed of the probes. No random generator is read or advanced.
        maximize: Maximize the objective instead of minimizing it.
        foreach: Update lists of tensors at a time; None leaves it to the device.
        fused: Update all tensors by one kernel, and measure with kernels too; on CUDA, where Triton compiles them. None
            does so wherever it can be done and neither ``foreach`` nor ``capturable`` is asked for.
        capturable: Keep the step count on the device, so that an ordinary step can be captured in a CUDA graph. When a
            measurement is due is counted on the host, by calls of ``step``, which replays are not.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = AdaHessian(model.parameters(), lr=0.15)
        >>> loss = model(torch.ones(8, 3)).square().mean()
        >>> loss.backward(create_graph=optimizer.curvature_due)
        >>> optimizer.step()
    """

    # Trainers in timm's style ask this once and then call backward(create_graph=True) at every step.
    is_second_order = True

    # The newest measurement until a step uses it, or a promise of it, and what the user has been told.
    _measurement: Measurement | None
    _awaited: Callable[[], tuple[Mapping[Tensor, Tensor], Mapping[Tensor, Tensor]]] | None
    _overdue_warned: bool
    _dropped_seen: int
    # What has been looked up: for the step of each group, for measurements of whole parameters and of shards, and the
    # tables of the fused kernels.
    _stepping: dict[int, Stepping]
    _measuring: dict[bool, Measuring]
    _fusion: Fusion

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.15,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        hessian_power: float = 1.0,
        *,
        block_size: int = 1,
        blocks: Layout = "auto",
        averaging: Averaging = "magnitude",
        num_probes: int = 1,
        update_every: int = 1,
        warmup_steps: int = 0,
        beta2_per: Beta2Per = "measurement",
        steady_start: bool = False,
        seed: int = 0,
        maximize: bool = False,
        foreach: bool | None = None,
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
            "blocks": blocks,
            "averaging": averaging,
            "num_probes": num_probes,
            "update_every": update_every,
            "warmup_steps": warmup_steps,
            "beta2_per": beta2_per,
            "steady_start": steady_start,
            "seed": seed,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "fused": fused,
            # Counts rather than settings, kept in the groups because every kind of checkpoint keeps those: steps taken,
            # measurements used, and steps taken with the newest of them.
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
            ValueError: If a setting of the group is out of its range.
        """
        if isinstance(param_group, dict):
            validate({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                refuse_cut_blocks(param)
        except ValueError:
            self.param_groups.pop()
            raise
        self._measurement = self._awaited = None  # one that the new group has no part in

    # The curvature comes in ------------------------------------------------------------------------------------------

    @property
    def curvature_due(self) -> bool:
        """Whether the next step wants a measurement that it does not have yet."""
        return self._measurement is None and self._awaited is None and any(map(is_due, self.param_groups))

    @property
    def num_probes(self) -> int:
        """Hessian-vector products a measurement."""
        return max(int(group["num_probes"]) for group in self.param_groups)

    def measured_parameters(self) -> list[Tensor]:
        """The parameters that a measurement is about: all that are not frozen, in the order of their groups."""
        return [param for group in self.param_groups for param in group["params"] if param.requires_grad]

    def draw_probes(self, probe: int, out: Sequence[Tensor] | None = None) -> list[Tensor]:
        """A Rademacher vector of the measurement that is due, in the shapes of :meth:`measured_parameters`.

        Args:
            probe: Number of the probe, from 0 to ``num_probes - 1``.
            out: Contiguous tensors to put it in, of the parameters' dtypes; None makes new ones.
        """
        return self._look_up(
            self.measured_parameters(),
            lambda: [member for member in self._parameters() if member[0].requires_grad],
            of_shards=False,
        ).draw(probe, out)

    def measured_blocks(self, *, of_shards: bool = False) -> list[Blocks]:
        """The blocks of :meth:`measured_parameters`, or of the shards of these that are on this rank."""
        return [
            states.blocks(local(param) if of_shards else param, group)
            for param, group, _ in self._parameters()
            if param.requires_grad
        ]

    def measure_gradients(self, gradients: Sequence[Tensor | None], scale: float | Tensor = 1.0) -> None:
        """Measure the curvature by differentiating gradients once more; their graph is freed.

        Args:
            gradients: Gradients of :meth:`measured_parameters`, made with ``create_graph=True``; None for a parameter
                that took no part in the loss.
            scale: What the loss has been multiplied by, as by a ``GradScaler``.

        Raises:
            CurvatureError: If an operation cannot be differentiated twice.
            RuntimeError: If a gradient is sparse.
        """
        params = self.measured_parameters()
        diagonal = hessian_diagonal(gradients, params, self.draw_probes, self.num_probes)
        self.feed_curvature(
            {
                param: d if isinstance(scale, float) and scale == 1 else d / scale
                for param, d in zip(params, diagonal, strict=True)
                if d is not None
            },
            {param: g for param, g in zip(params, gradients, strict=True) if g is not None},
        )

    @torch.no_grad()
    def feed_curvature(
        self, diagonal: Mapping[Tensor, Tensor], gradients: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        """Hand over a measured Hessian diagonal, for the next step to use.

        Args:
            diagonal: For each parameter the signed mean of ``z * (H z)``, in its shape; for one that is spread over
                ranks the whole of it, or a tensor that is spread alike. It is the same on all ranks. A parameter that
                took no part in the loss is left out.
            gradients: For each of these parameters the gradient of the same loss. It tells a block that took no part,
                such as the embedding of a word that did not occur, from one whose curvature is zero: the former takes
                no step until it has been measured. Without it every block counts as measured.

        Raises:
            TypeError: If it is not given a mapping.
            ValueError: If a parameter is not this optimizer's, or a diagonal has another shape than its parameter.
        """
        if not isinstance(diagonal, Mapping):
            raise TypeError(f"feed_curvature takes a dict from parameters to tensors, not a {type(diagonal).__name__}")
        params = list(diagonal)
        measurement = self._look_up(params, lambda: self._fed_members(diagonal), of_shards=True).estimates(
            list(diagonal.values()), None if gradients is None else [gradients.get(param) for param in params]
        )
        for group in self.param_groups:
            if group["steady_start"] and not group["measurements"]:
                for param in filter(measurement.__contains__, group["params"]):
                    values, not_finite = measurement[param]
                    measurement[param] = Estimate(steadied(values, partial(over_ranks, param)), not_finite)
        self._measurement = agreed(measurement)

    def await_curvature(self, complete: Callable[[], tuple[Mapping[Tensor, Tensor], Mapping[Tensor, Tensor]]]) -> None:
        """Promise a measurement that is not complete before the next step, which asks for it.

        Args:
            complete: Returns what :meth:`feed_curvature` takes.
        """
        self._awaited = complete

    def awaits(self, complete: object) -> bool:
        """Whether the next step is going to ask for this one."""
        return self._awaited is not None and self._awaited == complete

    @property
    def dropped_measurements(self) -> int:
        """How many measurements of a parameter were not finite, and were dropped. Reading waits for the device."""
        of_params = (self.state.get(param, {}) for param, _, _ in self._parameters())
        count = int(sum(state["dropped"].item() for state in of_params if state))
        if count > self._dropped_seen:
            warnings.warn(
                f"{count} curvature measurements of single parameters were infinite or NaN, and were dropped. If their "
                "number keeps growing, lower lr, or look for overflow in low precision.",
                stacklevel=2,
            )
        self._dropped_seen = count
        return count

    # The step --------------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step of Algorithm 1.

        Gradients that carry their graph (``backward(create_graph=True)``) are differentiated once more if a measurement
        is due. Their graph is let go in any case.

        Args:
            closure: Evaluates the model anew, with gradients enabled, calls ``backward`` and returns the loss.

        Raises:
            CurvatureError: If no curvature was ever measured, or an operation cannot be differentiated twice.
            RuntimeError: If a gradient is sparse, or a state does not fit its parameter.
        """
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        # Whatever can go wrong does so before anything is changed.
        stepping = [self._gather(group) for group in self.param_groups]
        if self._awaited is not None:
            self.feed_curvature(*self._awaited())
            self._awaited = None
        self._measure_from_graph()
        self._warn_if_overdue()
        ready = [self._is_ready(part) for part in stepping]

        measurement = self._measurement
        if any(ready):
            self._measurement = None
        for part, is_ready in zip(stepping, ready, strict=True):
            part.complete(self.state, self._fusion)
            if is_ready:
                self._step_group(part, measurement)
        return loss

    def _gather(self, group: Group) -> Stepping:
        """What takes part in this step, checked."""
        params = list(group["params"])
        gradients = [gradient for param in params if (gradient := param.grad) is not None]
        if set(map(_LAYOUT, gradients)) - {torch.strided}:
            for gradient in gradients:
                refuse_sparse(gradient)
        if len(gradients) < len(params):
            params = [param for param in params if param.grad is not None]
        known = self._stepping.get(id(group))
        if known is None or known.group is not group or not known.is_current(params, self.state):
            if known is None:  # a group that was removed is forgotten
                own = set(map(id, self.param_groups))
                self._stepping = {number: kept for number, kept in self._stepping.items() if number in own}
            known = self._stepping[id(group)] = Stepping(group, params, self.state)
        return known

    def _measure_from_graph(self) -> None:
        """The classic loop's measurement, from gradients that carry their graph."""
        with_graph = [
            param
            for group in self.param_groups
            for param in group["params"]
            if (gradient := param.grad) is not None and gradient.requires_grad
        ]
        if with_graph and self.curvature_due:
            refuse_several_processes()
            check_twice_differentiable([param.grad for param in with_graph if param.grad is not None])
            scaler = calling_scaler()
            scale = 1.0 if scaler is None else scale_of(scaler, with_graph[0].device)
            self.measure_gradients([param.grad for param in self.measured_parameters()], scale)
        for param in with_graph:
            # A gradient that keeps its graph keeps its parameter, which keeps its gradient: a cycle.
            param.grad = param.grad.detach() if param.grad is not None else None

    def _warn_if_overdue(self) -> None:
        overdue = next(filter(is_long_overdue, self.param_groups), None)
        if overdue is not None and self._measurement is None and not self._overdue_warned:
            self._overdue_warned = True
            warnings.warn(
                f"the curvature is {overdue['staleness']} steps old but update_every is {overdue['update_every']}: "
                "call curvature.measure(batch) before each step, or "
                "loss.backward(create_graph=optimizer.curvature_due)",
                stacklevel=5,  # past step and the two wrappers that torch puts around it
            )

    def _is_ready(self, part: Stepping) -> bool:
        """Whether a group can step. One that was never measured may be asked to only if nothing would move."""
        if part.group["measurements"] or not part.params:
            return True
        stands_still = part.group["lr"] == 0
        if self._measurement is not None:
            # Checkpoint libraries make the state of a fresh optimizer by such a step, which the measurement outlasts.
            return not (stands_still and part.is_flat())
        if stands_still or part.is_flat():
            return False
        raise CurvatureError(
            "no curvature has been measured yet, so AdaHessian cannot step. Before optimizer.step(), call "
            "curvature.measure(batch), with curvature = adahessian.Curvature(model, loss_fn, optimizer), or replace "
            "loss.backward() by loss.backward(create_graph=optimizer.curvature_due). In a trainer, see "
            "adahessian.integrations."
        )

    def _step_group(self, part: Stepping, measurement: Measurement | None) -> None:
        count_step(part.group, measured=measurement is not None)
        if not part.params:
            return
        counts = part.count()
        for tensors, chosen in part.fused:
            self._step_fused(tensors, part, chosen, picked(counts, chosen), measurement or {})
        if part.plain:
            self._step_plain(part, measurement or {})

    def _step_fused(
        self, tensors: FusedTensors, part: Stepping, chosen: list[int], counts: list[float], measurement: Measurement
    ) -> None:
        group = part.group
        # A launch has one setting for all. Parameters without a gradient now and then have taken fewer steps.
        for count in sorted(set(counts)):
            same = chosen
            if counts.count(count) < len(counts):
                same = [i for i, own in zip(chosen, counts, strict=True) if own == count]
            of_all = tensors if same is chosen else self._fusion.table([part.member(i) for i in same])
            measured = [i for i in same if part.params[i] in measurement] if measurement else []
            if measured:
                of_some = of_all if measured == same else self._fusion.table([part.member(i) for i in measured])
                of_some.fold(
                    [part.states[i] for i in measured],
                    [measurement[part.params[i]] for i in measured],
                    beta2=float(group["betas"][1]),
                    new_age=count if group["beta2_per"] == "step" else None,
                )
            of_all.update(
                picked(part.here, same),
                part.gradients(same),
                picked(part.states, same),
                step=count,
                lr=float(group["lr"]),
                # Triton knows Python's numbers, but not those of NumPy.
                beta1=float(group["betas"][0]),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                hessian_power=float(group["hessian_power"]),
                maximize=group["maximize"],
            )

    def _step_plain(self, part: Stepping, measurement: Measurement) -> None:
        group = part.group
        beta1, beta2 = group["betas"]
        of_plain = [part.states[i] for i in part.plain]
        measured = [
            (state, measurement[part.params[i]])
            for i, state in zip(part.plain, of_plain, strict=True)
            if measurement and part.params[i] in measurement
        ]
        if measured:
            per_measurement = group["beta2_per"] == "measurement"
            update_hessian_rms(
                [state["hessian_rms"] for state, _ in measured],
                [state["hessian_age"] for state, _ in measured],
                [state["dropped"] for state, _ in measured],
                [estimate for _, estimate in measured],
                list(torch._foreach_add([state["hessian_age"] for state, _ in measured], 1))
                if per_measurement
                else [state["step"] for state, _ in measured],
                beta2=beta2,
            )
        params = [part.here[i] for i in part.plain]
        update_parameters(
            [as_reals(param) for param in params],
            [as_reals(part.gradient(i)) for i in part.plain],
            [as_reals(state["exp_avg"]) for state in of_plain],
            [state["hessian_rms"] for state in of_plain],
            [state["step"] for state in of_plain],
            [part.blocks[i] for i in part.plain],
            lr=group["lr"],
            beta1=beta1,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            hessian_power=group["hessian_power"],
            maximize=group["maximize"],
            capturable=group["capturable"],
            foreach=_use_foreach(group, params),
        )

    # The state -------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the optimizer's state. Averages and counts keep their own dtype.

        Raises:
            ValueError: If it is another optimizer's, or does not fit the parameters; nothing is loaded then.
        """
        loaded: StateDict = {}

        def check(_: Optimizer, incoming: StateDict) -> None:
            if any(not {"hessian_power", "update_every"} <= group.keys() for group in incoming["param_groups"]):
                raise ValueError("this is the state of another optimizer: load one that AdaHessian has saved")
            for param, group, state in self._match(incoming):
                if (problem := states.misfit(state, param, states.blocks(param, group))) is not None:
                    raise ValueError(problem)
            loaded.update(incoming)

        def restore_dtypes(_: Optimizer) -> None:
            for param, group, state in self._match(loaded):
                for key in states.KEEP_THEIR_DTYPE:
                    if key in state:
                        self.state[param][key] = state[key].to(**states.own_dtype(param))
                if isinstance(state.get("step"), Tensor):
                    # A copy, as the other optimizer may go on counting; and where this one reads it.
                    self.state[param]["step"] = state["step"].clone().to(states.step_device(param, group))

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
        for param, group, _ in self._parameters():
            if self.state.get(param):
                states.complete(self.state[param], param, group)

    def _forget_transients(self) -> None:
        self._measurement = None
        self._awaited = None
        self._overdue_warned = False
        self._dropped_seen = 0
        self._stepping = {}
        self._measuring = {}
        self._fusion = Fusion()

    def _look_up(self, params: list[Tensor], members: Callable[[], list[Member]], *, of_shards: bool) -> Measuring:
        """What a measurement of these parameters needs to know of them, or of their shards on this rank."""
        known = self._measuring.get(of_shards)
        if known is not None and not known.is_current(params, self.param_groups):
            # Both, or the other would keep alive what has been removed.
            self._measuring.clear()
            known = None
        if known is None:
            known = Measuring(members(), self.param_groups, self._fusion, of_shards=of_shards)
            self._measuring[of_shards] = known
        return known

    def _fed_members(self, diagonal: Mapping[Tensor, Tensor]) -> list[Member]:
        members = {member[0]: member for member in self._parameters()}
        for param, values in diagonal.items():
            if param not in members:
                what = f"of shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
                raise ValueError(f"a curvature {what} was fed for what is no parameter of this optimizer")
        return [members[param] for param in diagonal]

    def _parameters(self) -> Iterator[Member]:
        """Each parameter with its group and its position among all of them, by which its probes are drawn.

        A complex parameter takes two positions, as the pair of real ones that it stands for.
        """
        position = 0
        for group in self.param_groups:
            for param in group["params"]:
                yield param, group, position
                position += 2 if param.is_complex() else 1


def _use_foreach(group: Group, params: list[Tensor]) -> bool:
    """As torch's own optimizers decide: lists where launches cost, unless a tensor lr stands in the way."""
    if group["foreach"] is not None:
        return bool(group["foreach"])
    if isinstance(group["lr"], Tensor) and not group["capturable"]:
        return False
    return all(param.device.type in ("cuda", "xpu") for param in params)
