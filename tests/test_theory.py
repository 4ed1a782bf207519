"""The appendix of the paper, and the statements of docs/algorithm.md about weight decay and noise.

For alpha I <= H <= beta I, one step of size alpha^k / beta along H^-k g, D^-k g or block-averaged D^-k g lowers f by at
least alpha^k / (2 beta^(1+k)) |g|^2.
"""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adahessian import AdaHessian, Curvature

POWERS = [0.0, 0.25, 0.5, 1.0]


class Quadratic:
    """``w A w / 2`` with eigenvalues between alpha and beta, in a random basis."""

    def __init__(self, seed: int, alpha: float = 0.5, beta: float = 20.0, size: int = 12) -> None:
        generator = torch.Generator().manual_seed(seed)
        basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
        values = torch.linspace(math.log(alpha), math.log(beta), size, dtype=torch.float64).exp()
        self.matrix = basis @ values.diag() @ basis.T
        self.alpha, self.beta = alpha, beta
        self.start = torch.randn(size, generator=generator, dtype=torch.float64)

    def __call__(self, w: Tensor) -> Tensor:
        return w @ self.matrix @ w / 2


class LogisticRegression:
    """Mean logistic loss with an L2 penalty: H = X' S X / n + penalty, with 0 <= S <= 1/4."""

    def __init__(self, seed: int, penalty: float = 0.05, size: int = 12) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(40, size, generator=generator, dtype=torch.float64)
        self.y = torch.randint(2, (40,), generator=generator, dtype=torch.float64) * 2 - 1
        self.penalty = penalty
        self.alpha = penalty
        self.beta = torch.linalg.eigvalsh(self.x.T @ self.x / 40).max().item() / 4 + penalty
        self.start = torch.randn(size, generator=generator, dtype=torch.float64)

    def __call__(self, w: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-self.y * (self.x @ w)).mean() + self.penalty * w @ w / 2


def direction(kind: str, hessian: Tensor, gradient: Tensor, power: float) -> Tensor:
    if kind == "hessian":
        values, basis = torch.linalg.eigh(hessian)
        return basis @ (values**-power * (basis.T @ gradient))
    diagonal = hessian.diag()
    if kind == "block":
        diagonal = diagonal.view(6, 2).mean(1).repeat_interleave(2)
    return diagonal**-power * gradient


@pytest.mark.parametrize("problem", [Quadratic, LogisticRegression])
@pytest.mark.parametrize("kind", ["hessian", "diagonal", "block"])
@pytest.mark.parametrize("power", POWERS)
def test_guaranteed_decrease(problem, kind, power):
    for seed in range(20):
        f = problem(seed)
        hessian = torch.autograd.functional.hessian(f, f.start)
        w = f.start.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(f(w), w)
        step = f.alpha**power / f.beta * direction(kind, hessian, gradient, power)
        promised = f.alpha**power / (2 * f.beta ** (1 + power)) * gradient.square().sum()
        assert f(f.start) - f(f.start - step) >= promised * (1 - 1e-12)


@pytest.mark.parametrize("problem", [Quadratic, LogisticRegression])
@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("block_size", [1, 2])
def test_the_optimizer_keeps_the_promise(problem, power, block_size):
    """One step of the optimizer with the exact diagonal is the step of the theorem."""
    for seed in range(10):
        f = problem(seed)
        param = f.start.view(3, 4).clone().requires_grad_()
        hessian = torch.autograd.functional.hessian(f, f.start)
        optimizer = AdaHessian(
            [param], lr=f.alpha**power / f.beta, eps=0.0, hessian_power=power, block_size=block_size, betas=(0.9, 0.999)
        )
        loss = f(param.flatten())
        loss.backward()
        gradient = param.grad.flatten().clone()
        optimizer.set_curvature({param: hessian.diag().view(3, 4)})
        optimizer.step()
        expected = f.start - f.alpha**power / f.beta * direction(
            "block" if block_size == 2 else "diagonal", hessian, gradient, power
        )
        torch.testing.assert_close(param.detach().flatten(), expected, rtol=1e-12, atol=1e-12)
        promised = f.alpha**power / (2 * f.beta ** (1 + power)) * gradient.square().sum()
        assert loss - f(param.flatten()) >= promised * (1 - 1e-12)


def test_power_zero_is_gradient_descent():
    f = Quadratic(0)
    param = f.start.clone().requires_grad_()
    plain = f.start.clone().requires_grad_()
    optimizer = AdaHessian([param], lr=0.01, eps=0.0, hessian_power=0.0, betas=(0.0, 0.999))
    descent = torch.optim.SGD([plain], lr=0.01)
    for _ in range(10):
        for w, o in ((param, optimizer), (plain, descent)):
            o.zero_grad()
            f(w).backward(create_graph=o is optimizer)
            o.step()
    torch.testing.assert_close(param, plain, rtol=1e-12, atol=1e-12)


def test_power_one_with_a_diagonal_hessian_is_newton():
    scale = torch.tensor([10.0, 1.0, 3.0], dtype=torch.float64)
    param = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64, requires_grad=True)
    optimizer = AdaHessian([param], lr=1.0, eps=0.0)
    (scale * param**2).sum().backward(create_graph=True)
    optimizer.step()
    torch.testing.assert_close(param, torch.zeros_like(param), rtol=0, atol=1e-15)


def test_figure_1_of_the_paper_is_one_step():
    """f(x, y) = 10 x^2 + y^2."""
    param = torch.tensor([0.8, -1.7], requires_grad=True)
    optimizer = AdaHessian([param], lr=1.0, eps=0.0)
    (10 * param[0] ** 2 + param[1] ** 2).backward(create_graph=True)
    optimizer.step()
    assert param.abs().max() < 1e-6


def test_degenerate_options_are_adamw():
    """With the gradient in place of the curvature, and blocks of one, Algorithm 1 is AdamW."""
    torch.manual_seed(0)
    ours = torch.randn(4, 5, dtype=torch.float64).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    options = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    optimizer, adamw = AdaHessian([ours], **options), torch.optim.AdamW([theirs], **options)
    for _ in range(100):
        gradient = torch.randn(4, 5, dtype=torch.float64)
        ours.grad, theirs.grad = gradient, gradient.clone()
        optimizer.set_curvature({ours: gradient})
        optimizer.step()
        adamw.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_weight_decay_is_a_penalty_in_the_metric_of_the_curvature():
    curvature = torch.tensor([0.1, 1.0, 100.0], dtype=torch.float64)
    target = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = AdaHessian([w], 0.1, eps=1e-12, weight_decay=0.5)
    for _ in range(300):
        optimizer.zero_grad()
        (curvature * (w - target).square() / 2).sum().backward(create_graph=True)
        optimizer.step()
    # The minimum of the loss plus 0.5 / 2 sum D w^2 for every D. An L2 penalty would leave the last one at its target.
    torch.testing.assert_close(w.detach(), target / 1.5)


def test_steps_of_weights_before_a_norm_grow_with_the_weights():
    inputs = torch.randn(16, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def relative_step(scale, make_optimizer):
        weight = (scale * start).requires_grad_()
        before = weight.detach().clone()
        optimizer = make_optimizer(weight)
        normed = torch.nn.functional.batch_norm(inputs @ weight.T, None, None, training=True, eps=1e-14)
        (normed**3).mean().backward(create_graph=True)
        optimizer.step()
        return (weight.detach() - before) / scale

    def ours(weight):
        return AdaHessian([weight], 0.1, eps=1e-14)

    def sgd(weight):
        return torch.optim.SGD([weight], 0.1)

    torch.testing.assert_close(relative_step(0.01, ours), relative_step(1.0, ours), rtol=1e-5, atol=0)
    torch.testing.assert_close(relative_step(0.01, sgd), 1e4 * relative_step(1.0, sgd), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("batch_fraction", "num_probes", "expected", "expected_of_alike"),
    [(0.25, 1, 2.0, 1.0), (0.125, 1, 8**0.5, 1.0), (0.25, 4, 1.0, 0.5), (1.0, 4, 0.5, 0.5)],
)
@pytest.mark.parametrize("alike", [False, True], ids=["examples differ", "examples are alike"])
def test_noise_goes_with_the_root_of_probes_and_of_examples_that_differ(
    batch_fraction, num_probes, expected, expected_of_alike, alike
):
    def size(fraction, probes):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 10))
        weights = [model[0].weight, model[2].weight]
        optimizer = AdaHessian(weights, lr=0.0, betas=(0.9, 1 - 1e-6), num_probes=probes)
        curvature = Curvature(
            model, lambda model, batch: cross_entropy(model(batch[0]), batch[1]), optimizer, batch_fraction=fraction
        )
        generator = torch.Generator().manual_seed(1)
        for _ in range(30):
            examples = (torch.randn(64, 20, generator=generator), torch.randint(10, (64,), generator=generator))
            curvature.measure(
                tuple(part[:1].repeat(64, *[1] * (part.dim() - 1)) for part in examples) if alike else examples
            )
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            optimizer.step()
        return torch.stack([optimizer.state[weight]["hessian_rms"].log().mean().exp() for weight in weights])

    ratio = size(batch_fraction, num_probes) / size(1.0, 1)
    torch.testing.assert_close(ratio, torch.full((2,), expected_of_alike if alike else expected), rtol=0.1, atol=0)


def test_the_documented_way_to_find_the_noise_of_a_model_leaves_it_alone():
    text = (Path(__file__).parents[1] / "docs" / "algorithm.md").read_text()
    (snippet,) = re.findall(r"```python\n(def sizes.*?)```", text, re.DOTALL)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 10))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = {
        "model": model,
        "loss_fn": lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        "loader": ((torch.randn(64, 20), torch.randint(10, (64,))) for _ in itertools.count()),
        **{name: __import__(name) for name in ("adahessian", "copy", "itertools", "statistics")},
    }
    exec(snippet, names)
    assert 1 < names["statistics"].median(names["ratios"]) < 2.5
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
