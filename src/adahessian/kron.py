"""AdaHessianKron: the optimizer whose curvature rotates."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from adahessian.algorithm.kronecker import Rotation
from adahessian.algorithm.state import Group, measure_anew, shape_of
from adahessian.base.log import warn_once
from adahessian.base.shards import is_sharded, rows_cut_by
from adahessian.optimizer import AdaHessian

# Options of AdaHessian that Kronecker factors do not have.
_UNUSED = {"eps": 0.0, "hessian_power": 1.0, "averaging": "auto", "signed": False, "steady_start": False, "fused": None}


class AdaHessianKron(AdaHessian):
    r"""AdaHessian with Kronecker factors of the Hessian, which rotate the momentum before they rescale it.

    .. math::
        Y_t &= H_t z, \quad z \text{ Rademacher} && \text{exact product} \\
        L_t &= \overline{Y Y^\top} / n, \quad R_t = \overline{Y^\top Y} / m && \text{running means, in blocks} \\
        u_t &= (L_t + \delta \bar\lambda_L)^{-1/2} \, m_t \, (R_t + \delta \bar\lambda_R)^{-1/2}
            && \text{Newton's step, except for its length} \\
        \theta_t &= \theta_{t-1} - \eta \, (c_t u_t + \lambda \theta_{t-1}) && \text{step, decoupled weight decay}

    Each row of a matrix has its own scale :math:`c_t`, which matches the length of AdamW's step, so AdamW's learning
    rate, weight decay and schedule apply. Vectors keep mean squares of their elements and have a single scale. Measure
    with :class:`adahessian.Curvature`, which uses a quarter of each batch by default. Kernels are treated as matrices
    of shape (out, in x kernel). :func:`adahessian.param_groups` marks stacks of matrices, grouped or transposed
    convolutions, and embedding tables, whose rows get a diagonal. With FSDP2, blocks of rows are also split at shard
    boundaries.

    Args:
        params: Parameters, named parameters or groups. Complex parameters are not supported, nor are grouped or
            transposed convolutions that are sharded over ranks.
        lr: Learning rate :math:`\eta`. Use the learning rate you would use for AdamW.
        betas: Decay rates :math:`\beta_1` of the gradient momentum, per step, and :math:`\beta_2` of the factors, per
            measurement.
        block_size: Largest number of rows or columns that share a factor. Longer dimensions are cut into blocks.
        damping: Minimum damping :math:`\delta`, relative to the mean eigenvalue. After n measurements, the damping is
            1 / n, but at least this value.
        num_probes: Number of Hessian-vector products per measurement. Their outer products are averaged.
        weight_decay, curvature_every, curvature_warmup, seed, maximize, capturable: As for :class:`AdaHessian`.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import torch, adahessian
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = AdaHessianKron(adahessian.param_groups(model), lr=1e-3)
        >>> curvature = adahessian.Curvature(model, lambda m, batch: m(batch).square().mean(), optimizer)
        >>> curvature.measure(torch.ones(8, 3))
        True
    """

    default_batch_fraction = 0.25
    needs_marks = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        *,
        block_size: int = 256,
        damping: float = 1e-2,
        curvature_every: int = 10,
        curvature_warmup: int = 50,
        num_probes: int = 1,
        seed: int = 0,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "block_size": block_size}
        options |= {"damping": damping, "curvature_every": curvature_every, "curvature_warmup": curvature_warmup}
        options |= {"num_probes": num_probes, "seed": seed, "maximize": maximize, "capturable": capturable}
        self._start(params, {**_UNUSED, **options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. The next step measures all groups.

        Raises:
            ValueError: If an option of the group is out of its range or belongs to AdaHessian only, or a parameter is
                complex, or sharded across the rows of several matrices.
        """
        for name, unused in _UNUSED.items() if isinstance(param_group, dict) else ():
            # adahessian.param_groups sets averaging to "kernel" or "row", for AdaHessian.
            if param_group.get(name, unused) not in (unused, "kernel", "row"):
                raise ValueError(
                    f"{name}={param_group[name]!r} is not an option of AdaHessianKron. Leave it out of the group."
                )
        measurement = self._measurement
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for param in group["params"]:
            shape = shape_of(param, group) if is_sharded(param) else None
            is_cut = isinstance(shape, Rotation) and not shape.can_be_sharded
            if param.is_complex() or is_cut:
                self.param_groups.pop()
                self._measurement = measurement
                what = "a grouped or transposed convolution, sharded over ranks" if is_cut else "complex"
                raise ValueError(
                    f"params contains a parameter that is {what}, which has no Kronecker factors. Use AdaHessian."
                )
        group["shards"] = _shards(group)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state dict. It may come from another number of ranks, whose shards may cut the blocks elsewhere.

        If the blocks of a parameter have changed, the next step measures it again, and a warning is logged.

        Raises:
            ValueError: If ``state_dict`` is from another optimizer or does not fit. Nothing is loaded in that case.
        """
        super().load_state_dict(state_dict)
        changed = 0
        for group in self.param_groups:
            before, group["shards"] = group.get("shards", 1), _shards(group)
            known = [param for param in group["params"] if param in self.state and before != group["shards"]]
            if found := sum([measure_anew(self.state[param], param, group, before) for param in known]):
                changed += found
                group["staleness"] = max(group["staleness"], group["curvature_every"])
        if changed:
            warn_once(
                f"The state of {changed} parameters was saved with shards that cut their rows into other blocks. The "
                "next step measures these parameters again."
            )


def _shards(group: Group) -> int:
    """Return the number of shards of the parameters of a group."""
    cuts = map(rows_cut_by, group["params"])
    return max((mesh.size(dim) for mesh, dim in filter(None, cuts)), default=1)
