"""timm's registry where timm is installed, and its training loop everywhere."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from adahessian import AdaHessian, AdaHessianKron, Curvature, CurvatureError, param_groups
from adahessian.integrations.timm import register

# The factory ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def timm_optim() -> Iterator[Any]:
    """``timm.optim`` with the optimizer registered. timm needs torchvision, so the import may fail for its sake."""
    try:
        registry = import_module("timm.optim._optim_factory").default_registry
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"timm cannot be imported: {error}")
    before = dict(registry._optimizers)
    register()
    yield import_module("timm.optim")
    registry._optimizers.clear()
    registry._optimizers.update(before)


def test_factory_creates_it_from_the_arguments_of_the_script(timm_optim: Any) -> None:
    script = Namespace(opt="adahessian2", lr=0.1, weight_decay=0.05, momentum=0.9, opt_eps=1e-3, opt_betas=[0.8, 0.99])
    options = {"curvature_every": 10, "signed": True}
    optimizer = timm_optim.create_optimizer_v2(network(), **timm_optim.optimizer_kwargs(script), **options)
    assert isinstance(optimizer, AdaHessian)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.05]
    expected = {"lr": 0.1, "eps": 1e-3, "betas": [0.8, 0.99], **options}
    for group in optimizer.param_groups:
        assert {name: group[name] for name in expected} == expected


@pytest.mark.parametrize(("name", "kind"), [("adahessian2", AdaHessian), ("adahessiankron", AdaHessianKron)])
def test_factory_keeps_the_defaults(timm_optim: Any, name: str, kind: type[AdaHessian]) -> None:
    made = timm_optim.create_optimizer_v2(network(), name)
    assert type(made) is kind
    assert made.defaults == kind(network().parameters()).defaults


def test_factory_takes_groups_by_module(timm_optim: Any) -> None:
    made = timm_optim.create_optimizer_v2(network(), "adahessian2", weight_decay=0.1, param_group_fn=param_groups)
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.1]
    assert made.param_groups[0]["averaging"] == "kernel"


def test_timm_keeps_its_own_optimizer_unless_its_name_is_given(timm_optim: Any) -> None:
    assert timm_optim.get_optimizer_info("adahessian").opt_class is not AdaHessian
    info = timm_optim.get_optimizer_info("adahessian2")
    assert info.opt_class is AdaHessian
    assert info.second_order
    register("adahessian")
    assert timm_optim.get_optimizer_info("adahessian").opt_class is AdaHessian


def test_rejects_a_name_that_the_factory_would_split() -> None:
    with pytest.raises(ValueError, match="name"):
        register("ada_hessian")


def test_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("timm", "timm.optim", "timm.optim._optim_factory"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"adahessian\[timm\]"):
        register()


# The loop ------------------------------------------------------------------------------------------------------------


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
    """timm's loop, with the line that the module's documentation adds for a curvature pass of its own."""
    second_order = hasattr(optimizer, "is_second_order") and optimizer.is_second_order
    clipping: dict[str, Any] = {"clip_grad": clip_grad, "clip_mode": clip_mode, "parameters": list(model.parameters())}
    model.train()
    optimizer.zero_grad()
    for index, (images, target) in enumerate(loader):
        need_update = (index + 1) % accum_steps == 0
        if curvature is not None:
            curvature.measure((images, target))
        loss = cross_entropy(model(images), target) / accum_steps
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, create_graph=second_order, need_update=need_update, **clipping)
        else:
            loss.backward(create_graph=second_order)
            if need_update:
                if clip_grad is not None:
                    clip_gradients(clipping["parameters"], clip_grad, clip_mode)
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


def optimizer_of(model: nn.Module, **options: Any) -> AdaHessian:
    return AdaHessian(model.parameters(), lr=0.05, weight_decay=0.1, **options)


def trained(loader: list[Batch], *, separate: bool = False, every: int = 1, **kwargs: Any) -> list[torch.Tensor]:
    """Train for an epoch of timm's loop, and return the weights."""
    model = network()
    optimizer = optimizer_of(model, curvature_every=every)
    curvature = None
    if separate:
        curvature = Curvature(model, lambda m, batch: cross_entropy(m(batch[0]), batch[1]), optimizer)
        optimizer.is_second_order = False
    train_one_epoch(model, loader, optimizer, curvature=curvature, **kwargs)
    return list(model.parameters())


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("clip", [{}, {"clip_grad": 0.05}, {"clip_grad": 1e-3, "clip_mode": "value"}], ids=str)
@pytest.mark.parametrize("every", [1, 3])
def test_loop_trains_as_with_a_curvature_pass_of_its_own(clip: dict[str, Any], every: int) -> None:
    loader = batches(7)
    assert_same(trained(loader, every=every, **clip), trained(loader, every=every, separate=True, **clip))


def test_accumulated_micro_batches_are_the_whole_batch() -> None:
    small = batches(6, size=4)
    large = [tuple(map(torch.cat, zip(*small[i : i + 2], strict=True))) for i in range(0, 6, 2)]
    assert_same(trained(small, accum_steps=2), trained(large))


@pytest.mark.parametrize("clip", [{}, {"clip_grad": 0.05}], ids=str)
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_scale_of_the_loss_does_not_reach_the_update(accum_steps: int, clip: dict[str, Any]) -> None:
    loader = batches(6)
    scaled = trained(loader, loss_scaler=NativeScaler(2.0**16), accum_steps=accum_steps, **clip)
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
    loader, model = batches(8), network()
    optimizer = optimizer_of(model, curvature_every=3)
    train_one_epoch(model, loader[:4], optimizer)
    saved = copy.deepcopy({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()})
    train_one_epoch(model, loader[4:], optimizer)

    resumed = network()
    optimizer = optimizer_of(resumed, curvature_every=3)
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


def test_wrapper_that_hides_the_second_order_gets_an_error() -> None:
    model = network()
    optimizer = optimizer_of(model)
    optimizer.is_second_order = False  # as timm's Lookahead hides it
    with pytest.raises(CurvatureError, match="create_graph"):
        train_one_epoch(model, batches(1), optimizer)
