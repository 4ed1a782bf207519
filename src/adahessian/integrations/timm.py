"""timm: register both optimizers for ``timm.optim.create_optimizer_v2`` and for timm's training script.

AdaHessian is registered as ``adahessian2``, because timm has its own ``adahessian`` with other defaults.
``docs/integrations.md`` shows how to use the optimizers.
"""

from importlib import import_module

from adahessian.kron import AdaHessianKron
from adahessian.optimizer import AdaHessian


def register(name: str = "adahessian2") -> None:
    """Register AdaHessian, and AdaHessianKron as ``adahessiankron``, for ``timm.optim.create_optimizer_v2``.

    Args:
        name: The name of AdaHessian, without underscores. ``"adahessian"`` replaces timm's own optimizer.

    Raises:
        ModuleNotFoundError: If timm is not installed, or is too old to have a registry.
        ValueError: If the name contains an underscore.
    """
    if "_" in name:
        raise ValueError(f"name={name!r} contains an underscore, which timm reads as a wrapper's prefix. Remove it.")
    try:
        factory = import_module("timm.optim._optim_factory")
    except ModuleNotFoundError as missing:
        message = 'timm is not installed, or is too old. Run: pip install "adahessian[timm]".'
        raise ModuleNotFoundError(message, name=missing.name) from missing
    for own, kind, what in (
        (name, AdaHessian, "Adam with the Hessian diagonal"),
        ("adahessiankron", AdaHessianKron, "Kronecker factors of the Hessian, at AdamW's learning rate"),
    ):
        has_eps = kind is AdaHessian
        info = factory.OptimInfo(own, kind, what, has_eps=has_eps, has_betas=True, second_order=True)
        factory.default_registry.register(info)
