"""timm's factory and its training loop, with the real factory where timm is installed and a stand-in elsewhere."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from adahessian import AdaHessian, Curvature, CurvatureError, param_groups
from adahessian.integrations.timm import register

# The factory ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimInfo:
    name: str
    opt_class: Any
    description: str = ""
    has_eps: bool = True
    has_momentum: bool = False
    has_betas: bool = False
    num_betas: int = 2
    second_order: bool = False
    defaults: dict[str, Any] | None = None


class StandInRegistry:
    """What timm 1.0.30 does with a name: from the arguments of its script to a constructor's keywords."""

    def __init__(self) -> None:
        self.infos: dict[str, OptimInfo] = {}

    def register(self, info: OptimInfo) -> None:
        self.infos[info.name.lower()] = info

    def create_optimizer(
        self,
        model_or_params: Any,
        opt: str,
        lr: float | None = None,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        foreach: bool | None = None,
        param_group_fn: Any = None,
        **kwargs: Any,
    ) -> torch.optim.Optimizer:
        params = model_or_params
        if isinstance(params, nn.Module) and param_group_fn is not None:
            params = param_group_fn(params)
        elif isinstance(params, nn.Module) and weight_decay:
            of_model = list(params.parameters())
            params = [
                {"params": [param for param in of_model if param.ndim <= 1], "weight_decay": 0.0},
                {"params": [param for param in of_model if param.ndim > 1], "weight_decay": weight_decay},
            ]
            weight_decay = 0.0
        elif isinstance(params, nn.Module):
            params = params.parameters()
        info = self.infos[opt.lower().split("_")[-1]]
        settings = {"weight_decay": weight_decay, **kwargs} | ({} if lr is None else {"lr": lr})
        if info.has_momentum:
            settings.setdefault("momentum", momentum)
        for name, is_known in (("eps", info.has_eps), ("betas", info.has_betas)):
            if not is_known:
                settings.pop(name, None)
        if foreach is not None:
            settings.setdefault("foreach", foreach)
        optimizer: torch.optim.Optimizer = info.opt_class(params, **settings)
        return optimizer


def keywords_of_the_script(arguments: Namespace) -> dict[str, Any]:
    renamed = {"opt_eps": "eps", "opt_betas": "betas", "opt_foreach": "foreach"}
    chosen = {renamed.get(name, name): value for name, value in vars(arguments).items() if value is not None}
    return chosen


def stand_in() -> dict[str, ModuleType]:
    package, optim, factory = map(ModuleType, ("timm", "timm.optim", "timm.optim._optim_factory"))
    registry = StandInRegistry()
    registry.register(OptimInfo("adahessian", torch.optim.SGD))  # its own, which is none of ours
    vars(factory).update(OptimInfo=OptimInfo, default_registry=registry)
    vars(optim).update(
        create_optimizer_v2=registry.create_optimizer,
        optimizer_kwargs=keywords_of_the_script,
        get_optimizer_info=lambda name: registry.infos[name],
    )
    return {"timm": package, "timm.optim": optim, "timm.optim._optim_factory": factory}


@pytest.fixture
def timm_optim(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``timm.optim``, with the optimizer registered."""
    try:
        import_module("timm.optim._optim_factory")
    except ImportError:
        for name, module in stand_in().items():
            monkeypatch.setitem(sys.modules, name, module)
    register()
    return import_module("timm.optim")


def test_factory_creates_it_from_the_arguments_of_the_script(timm_optim: Any) -> None:
    arguments = Namespace(
        opt="adahessian2",
        lr=0.1,
        weight_decay=0.05,
        momentum=0.9,
        opt_eps=1e-3,
        opt_betas=[0.8, 0.99],
        opt_foreach=False,
    )
    of_user = {"update_every": 10, "averaging": "signed"}
    optimizer = timm_optim.create_optimizer_v2(network(), **timm_optim.optimizer_kwargs(arguments), **of_user)
    assert isinstance(optimizer, AdaHessian)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.05]
    expected = {"lr": 0.1, "eps": 1e-3, "betas": [0.8, 0.99], "foreach": False, **of_user}
    for group in optimizer.param_groups:
        assert {name: group[name] for name in expected} == expected


def test_factory_leaves_the_defaults_where_nothing_is_said(timm_optim: Any) -> None:
    made = timm_optim.create_optimizer_v2(network(), "adahessian2")
    assert made.defaults == AdaHessian(network().parameters()).defaults


def test_factory_takes_groups_by_module(timm_optim: Any) -> None:
    made = timm_optim.create_optimizer_v2(network(), "adahessian2", weight_decay=0.1, param_group_fn=param_groups)
    assert [(group["blocks"], group["weight_decay"]) for group in made.param_groups] == [("kernel", 0.1), ("row", 0.1)]


def test_own_optimizer_of_timm_keeps_its_name_unless_replaced_by_name(timm_optim: Any) -> None:
    own = timm_optim.get_optimizer_info("adahessian")
    assert own.opt_class is not AdaHessian
    info = timm_optim.get_optimizer_info("adahessian2")
    assert info.opt_class is AdaHessian
    assert info.second_order
    register("adahessian")
    try:
        assert timm_optim.get_optimizer_info("adahessian").opt_class is AdaHessian
    finally:
        import_module("timm.optim._optim_factory").default_registry.register(own)


def test_name_that_the_factory_would_split_is_refused() -> None:
    with pytest.raises(ValueError, match="underscore"):
        register("ada_hessian")


def test_missing_timm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(stand_in()):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "adahessian\[timm\]'):
        register()


# The loop ---------------------------------------------------------------------------------------------------------


class NativeScaler:
    """timm's way of calling torch's scaler."""

    def __init__(self, scale: float) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def __call__(
        self,
        loss: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Any = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        self.scaler.scale(loss).backward(create_graph=create_graph)
        if need_update:
            if clip_grad is not None:
                self.scaler.unscale_(optimizer)
                clip_gradients(parameters, clip_grad, clip_mode)
            self.scaler.step(optimizer)
            self.scaler.update()


def clip_gradients(parameters: Any, value: float, mode: str) -> None:
    clip = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[mode]
    clip(parameters, value)


Batch = tuple[torch.Tensor, torch.Tensor]


def train_one_epoch(
    model: nn.Module,
    loader: list[Batch],
    optimizer: torch.optim.Optimizer,
    *,
    loss_scaler: NativeScaler | None = None,
    clip_grad: float | None = None,
    clip_mode: str = "norm",
    accum_steps: int = 1,
    curvature: Curvature[nn.Module] | None = None,
) -> None:
    """timm's loop; ``curvature`` is what its documentation here adds to it."""
    second_order = hasattr(optimizer, "is_second_order") and optimizer.is_second_order
    model.train()
    optimizer.zero_grad()
    for index, (images, target) in enumerate(loader):
        need_update = (index + 1) % accum_steps == 0
        if curvature is not None:
            curvature.measure((images, target))
        loss = cross_entropy(model(images), target)
        if accum_steps > 1:
            loss /= accum_steps
        if loss_scaler is not None:
            loss_scaler(
                loss,
                optimizer,
                clip_grad=clip_grad,
                clip_mode=clip_mode,
                parameters=list(model.parameters()),
                create_graph=second_order,
                need_update=need_update,
            )
        else:
            loss.backward(create_graph=second_order)
            if need_update:
                if clip_grad is not None:
                    clip_gradients(list(model.parameters()), clip_grad, clip_mode)
                optimizer.step()
        if need_update:
            optimizer.zero_grad()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 6 * 6, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def batches(number: int, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 1, 8, 8, dtype=torch.float64, generator=generator),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(number)
    ]


def optimizer_of(model: nn.Module, **settings: Any) -> AdaHessian:
    return AdaHessian(model.parameters(), lr=0.05, weight_decay=0.1, **settings)


def trained(loader: list[Batch], *, separate: bool = False, settings: Any = None, **how: Any) -> list[torch.Tensor]:
    """The weights after an epoch of timm's loop."""
    model = network()
    optimizer = optimizer_of(model, **(settings or {}))
    curvature = None
    if separate:
        curvature = Curvature(model, lambda m, batch: cross_entropy(m(batch[0]), batch[1]), optimizer)
        optimizer.is_second_order = False
    train_one_epoch(model, loader, optimizer, curvature=curvature, **how)
    return list(model.parameters())


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("clip", [{}, {"clip_grad": 0.05}, {"clip_grad": 1e-3, "clip_mode": "value"}], ids=str)
@pytest.mark.parametrize("every", [1, 3])
def test_loop_trains_as_with_a_curvature_pass_of_its_own(clip: dict[str, Any], every: int) -> None:
    loader, settings = batches(7), {"update_every": every}
    expected = trained(loader, separate=True, settings=settings, **clip)
    assert_same(trained(loader, settings=settings, **clip), expected)


def test_clipping_acts() -> None:
    loader = batches(2)
    assert not torch.allclose(trained(loader)[0], trained(loader, clip_grad=0.05)[0])


def test_accumulated_micro_batches_are_the_whole_batch() -> None:
    small = batches(6, size=4)
    large = [tuple(map(torch.cat, zip(*small[i : i + 2], strict=True))) for i in range(0, 6, 2)]
    assert_same(trained(small, accum_steps=2), trained(large))


@pytest.mark.parametrize("clip", [{}, {"clip_grad": 0.05}], ids=str)
@pytest.mark.parametrize("accum_steps", [1, 2])
@pytest.mark.parametrize("scale", [2.0**8, 2.0**16])
def test_scale_of_the_loss_does_not_reach_the_update(scale: float, accum_steps: int, clip: dict[str, Any]) -> None:
    loader = batches(6)
    scaled = trained(loader, loss_scaler=NativeScaler(scale), accum_steps=accum_steps, **clip)
    assert_same(scaled, trained(loader, accum_steps=accum_steps, **clip))


def test_skipped_step_skips_the_curvature_too() -> None:
    model = network()
    optimizer = optimizer_of(model)
    before = copy.deepcopy(model.state_dict())
    images, target = batches(1)[0]
    train_one_epoch(model, [(images * float("inf"), target)], optimizer, loss_scaler=NativeScaler(2.0**16))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert optimizer.curvature_due
    assert optimizer.param_groups[0]["measurements"] == 0


def test_resumed_epoch_continues_bit_by_bit() -> None:
    loader, settings = batches(8), {"update_every": 3}
    model = network()
    optimizer = optimizer_of(model, **settings)
    train_one_epoch(model, loader[:4], optimizer)
    saved = copy.deepcopy({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()})
    train_one_epoch(model, loader[4:], optimizer)

    resumed = network()
    optimizer = optimizer_of(resumed, **settings)
    resumed.load_state_dict(saved["state_dict"])
    optimizer.load_state_dict(saved["optimizer"])
    train_one_epoch(resumed, loader[4:], optimizer)
    torch.testing.assert_close(list(resumed.parameters()), list(model.parameters()), rtol=0, atol=0)


def test_schedule_of_layers_scales_each_group() -> None:
    model = network()
    first, *others = model.parameters()
    groups = [{"params": [first], "lr_scale": 0.0}, {"params": others, "lr_scale": 1.0}]
    optimizer = AdaHessian(groups, lr=0.05)
    for group in optimizer.param_groups:  # as timm's schedules do at every step
        group["lr"] = 0.01 * group["lr_scale"]
    before = [param.clone() for param in model.parameters()]
    train_one_epoch(model, batches(2), optimizer)
    moved = [not torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True)]
    assert moved == [False] + [True] * len(others)


def test_wrapper_that_hides_the_second_order_is_told_what_to_call() -> None:
    model = network()
    optimizer = optimizer_of(model)
    optimizer.is_second_order = False  # timm's Lookahead does not pass it on
    with pytest.raises(CurvatureError, match="create_graph"):
        train_one_epoch(model, batches(1), optimizer)
