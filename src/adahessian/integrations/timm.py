"""timm: register this optimizer for ``timm.optim.create_optimizer_v2`` and for timm's training script.

The name is ``adahessian2``, because timm has its own ``adahessian`` with other defaults. If an optimizer's name begins
with ``ada``, timm's script scales the learning rate by the square root of the batch size. Call :func:`register` at the
top of timm's ``train.py``, and pass options through ``--opt-kwargs``::

    python train.py --opt adahessian2 --lr 0.15 --opt-kwargs curvature_every=10 curvature_warmup=200

The script reads ``optimizer.is_second_order`` once per epoch and then calls ``backward(create_graph=True)`` at every
step. DistributedDataParallel does not support this. A separate curvature pass is faster and supports DDP::

    curvature = adahessian.Curvature(model, lambda model, batch: loss_fn(model(batch[0]), batch[1]), optimizer)
    optimizer.is_second_order = False
    curvature.measure((input, target))  # in train_one_epoch, before the loss

timm groups parameters by weight decay only. To group them by module as well, call
``create_optimizer_v2(model, "adahessian2", param_group_fn=adahessian.param_groups)``. timm's ``lookahead_`` wrapper
hides ``is_second_order``, so set it to True on the optimizer that the factory returns.
"""

from __future__ import annotations

from importlib import import_module

from adahessian.optimizer import AdaHessian


def register(name: str = "adahessian2") -> None:
    """Register AdaHessian for ``timm.optim.create_optimizer_v2(model, name, ...)``.

    Args:
        name: The name, without underscores. ``"adahessian"`` replaces timm's own optimizer.

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
    info = factory.OptimInfo(name, AdaHessian, "Adam with the Hessian diagonal", has_betas=True, second_order=True)
    factory.default_registry.register(info)
