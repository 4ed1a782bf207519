"""timm: a name under which its optimizer factory, and so its training script, finds this optimizer.

timm has an ``adahessian`` of its own. It stays as it is: recipes that name it keep their meaning, and its ``eps`` of
1e-8, its lack of averaging over kernels and its keywords are not these. So this one has a name of its own. It begins
with ``ada`` because timm's script scales the learning rate of such names by the root of the batch size.

Two lines at the top of timm's ``train.py``, and settings by ``--opt-kwargs``::

    import adahessian.integrations.timm
    adahessian.integrations.timm.register()

    python train.py --opt adahessian2 --lr 0.15 --opt-kwargs update_every=10 warmup_steps=200

The script then calls ``backward(create_graph=True)``, because the optimizer says ``is_second_order``. It asks that once
an epoch, so the graph is made at every step, also between measurements. DistributedDataParallel refuses such a
``backward``. Where either hurts, let the curvature have a pass of its own and the gradient its usual one::

    curvature = adahessian.Curvature(model, lambda model, batch: loss_fn(model(batch[0]), batch[1]), optimizer)
    optimizer.is_second_order = False
    ...
    curvature.measure((input, target))  # in train_one_epoch, before the loss

timm groups parameters by weight decay alone. Of a transformer, whose position embedding has three dimensions but is no
kernel, ``create_optimizer_v2(model, "adahessian2", param_group_fn=adahessian.param_groups)`` groups them by module. Its
``lookahead_`` wrapper hides ``is_second_order``: set that to True on what the factory returns.
"""

from __future__ import annotations

from importlib import import_module

from adahessian.optimizer import AdaHessian


def register(name: str = "adahessian2") -> None:
    """Make ``timm.optim.create_optimizer_v2(model, name, ...)`` create this optimizer.

    Args:
        name: The name, without underscores; ``"adahessian"`` replaces timm's own.

    Raises:
        ModuleNotFoundError: If timm is not installed, or is older than its registry of optimizers.
        ValueError: If the name has an underscore.
    """
    if "_" in name:
        raise ValueError(
            f"Invalid name: {name!r}. timm takes what comes before an underscore for a wrapper, as in lookahead_adam."
        )
    try:
        factory = import_module("timm.optim._optim_factory")
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            'this needs timm and its registry of optimizers: pip install "adahessian[timm]"', name=missing.name
        ) from missing
    factory.default_registry.register(
        factory.OptimInfo(
            name=name,
            opt_class=AdaHessian,
            description="AdaHessian: Adam with the curvature of the loss in place of the squared gradient",
            has_betas=True,
            second_order=True,
        )
    )
