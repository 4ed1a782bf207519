"""From a model to parameter groups."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def param_groups(
    model: nn.Module, *, weight_decay: float | None = None, decay_bias_and_norm: bool = True
) -> list[dict[str, Any]]:
    """Group a model's parameters by what its modules are.

    The weights of convolutions are averaged over their kernels, all others over rows: a position embedding and a stack
    of expert matrices have three dimensions too, but no kernels.

    Args:
        model: The model.
        weight_decay: Decay of the groups; None leaves it to the optimizer's own argument.
        decay_bias_and_norm: Whether vectors, scalars and the parameters of normalisation layers decay as well.

    Returns:
        Groups for ``AdaHessian(param_groups(model), ...)``, in the order of ``model.named_parameters()`` within each; a
        parameter that modules share is there once.

    Raises:
        TypeError: If it is given anything else than a module.

    Example:
        >>> groups = param_groups(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 2)), weight_decay=0.1)
        >>> [(group["blocks"], len(group["params"])) for group in groups]
        [('kernel', 2), ('row', 2)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"param_groups takes a torch.nn.Module, but got a {type(model).__name__}: pass the model itself"
        )
    groups: dict[tuple[str, float | None], list[tuple[str, nn.Parameter]]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        # A parametrization, such as weight norm, holds the parameters of the module that it belongs to.
        owner, _, _ = prefix.rpartition(".parametrizations.")
        kind = model.get_submodule(owner) if isinstance(module, ParametrizationList) else module
        for name, param in module.named_parameters(prefix, recurse=False):
            if id(param) in seen:
                continue
            seen.add(id(param))
            blocks = "kernel" if isinstance(kind, _ConvNd) else "row"
            exempt = not decay_bias_and_norm and (param.dim() < 2 or isinstance(kind, _NORMS))
            groups.setdefault((blocks, 0.0 if exempt else weight_decay), []).append((name, param))
    return [
        {"params": params, "blocks": blocks} | ({} if decay is None else {"weight_decay": decay})
        for (blocks, decay), params in groups.items()
    ]
