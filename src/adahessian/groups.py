"""Parameter groups of a model. The file is not named after its function, because the package exports the function."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def param_groups(
    model: nn.Module,
    *,
    weight_decay: float | None = None,
    decay_bias_and_norm: bool = True,
    sparse_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Group a model's parameters by module type.

    The curvature of convolutions is averaged over their kernels. Other parameters with four or five dimensions are
    averaged over rows, although ``averaging="auto"`` would treat them as kernels. All others follow the optimizer.
    For AdaHessianKron, ``kind`` marks embedding tables, stacks of matrices and transposed convolutions, and
    ``conv_groups`` is the number of groups of a convolution.

    Args:
        model: The model.
        weight_decay: Weight decay of the groups. None uses the optimizer's ``weight_decay``.
        decay_bias_and_norm: Apply weight decay to vectors, scalars and the parameters of normalization layers too.
        sparse_lr: Adagrad's learning rate for embedding tables with ``sparse=True``. The tables form the last group,
            without weight decay. None leaves them in the other groups.

    Returns:
        Groups of named parameters, each in the order of ``model.named_parameters()``. Frozen parameters are included,
        and shared parameters occur once.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If ``sparse_lr`` is given, but the model has no sparse embedding table.

    Example:
        >>> groups = param_groups(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 2)), weight_decay=0.1)
        >>> [(group.get("averaging"), len(group["params"])) for group in groups]
        [('kernel', 2), (None, 2)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not a {type(model).__name__}. Pass the model itself.")
    embeddings = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    weights = {each._parameters.get("weight") for each in embeddings}
    tables = {each._parameters.get("weight") for each in embeddings if each.sparse and sparse_lr is not None} - {None}
    if sparse_lr is not None and not tables:
        raise ValueError(f"sparse_lr={sparse_lr} needs a table with sparse=True, but the model has none. Pass None.")
    groups: dict[tuple[tuple[str, Any], ...], list[tuple[str, nn.Parameter]]] = {}
    for name, param in model.named_parameters():
        prefix = name.rpartition(".")[0]
        if isinstance(model.get_submodule(prefix), ParametrizationList):  # it holds parameters of its parent module
            prefix = prefix.rpartition(".parametrizations.")[0]
        module = model.get_submodule(prefix)
        options: dict[str, Any]
        if isinstance(module, _ConvNd):
            options = {"averaging": "kernel", "kind": "transposed" if module.transposed else None}
            options["conv_groups"] = module.groups if module.groups > 1 else None
        else:
            kind = "table" if param in weights else "stack" if param.dim() > 2 else None
            options = {"averaging": "row" if param.dim() in (4, 5) else None, "kind": kind}
        exempt = not decay_bias_and_norm and (param.dim() < 2 or isinstance(module, _NORMS))
        options["weight_decay"] = 0.0 if exempt else weight_decay
        if param in tables:
            options = {"sparse": True, "lr": sparse_lr, "weight_decay": 0.0}
        given = tuple((option, value) for option, value in options.items() if value is not None)
        groups.setdefault(given, []).append((name, param))
    tables_last = sorted(groups.items(), key=lambda group: ("sparse", True) in group[0])
    return [{"params": params, **dict(given)} for given, params in tables_last]
