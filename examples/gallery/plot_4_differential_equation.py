"""
A differential equation with a known solution
=============================================

A physics-informed network learns a function from a differential equation, here :math:`u'' = f` on :math:`[0, 1]` with
:math:`u(0) = u(1) = 0`. The solution is known, so the error of the network can be measured.
"""

import math

import matplotlib.pyplot as plt
import torch
from torch import nn

import adahessian

torch.set_num_threads(1)


def solution(x):
    return torch.sin(2 * math.pi * x) + 0.3 * torch.sin(8 * math.pi * x)


def second_derivative(x):
    first, second = (2 * math.pi) ** 2, (8 * math.pi) ** 2
    return -first * torch.sin(2 * math.pi * x) - 0.3 * second * torch.sin(8 * math.pi * x)


# %%
# The loss
# --------
# The loss contains second derivatives of the network with respect to its input. The curvature pass differentiates the
# loss twice more, with respect to the weights. The factor ``x * (1 - x)`` satisfies the boundary conditions.


def predict(model, x):
    return x * (1 - x) * model(x)


def loss_fn(model, x):
    x = x.detach().requires_grad_()
    u = predict(model, x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
    return ((ddu - second_derivative(x.detach())) / 100).square().mean()


points = torch.linspace(0, 1, 129).unsqueeze(1)


def relative_error(model):
    with torch.no_grad():
        return ((predict(model, points) - solution(points)).norm() / solution(points).norm()).item()


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))


def train(name, lr, steps=1500):
    model, curvature = make_model(), None
    if name == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    else:
        optimizer = adahessian.AdaHessianKron(adahessian.param_groups(model), lr=lr, weight_decay=0.0)
        # Every gradient uses all points, so it has no noise. The curvature uses all points too.
        curvature = adahessian.Curvature(model, loss_fn, optimizer, batch_fraction=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    errors = []
    for step in range(steps):
        if curvature is not None:
            curvature.measure(points)
        optimizer.zero_grad()
        loss_fn(model, points).backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 9:
            errors.append(relative_error(model))
    return model, errors


def train_lbfgs(evaluations=1500):
    model = make_model()
    options = {"max_iter": evaluations, "max_eval": evaluations, "history_size": 50, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(model.parameters(), tolerance_grad=0.0, tolerance_change=0.0, **options)

    def closure():
        optimizer.zero_grad()
        (loss := loss_fn(model, points)).backward()
        return loss

    optimizer.step(closure)
    return relative_error(model)


# %%
# The result
# ----------
# AdamW and AdaHessianKron take 1,500 steps at each of three learning rates. L-BFGS computes 1,500 gradients. It is a
# strong method for small problems without noise, so include it when you compare optimizers on such a problem.

learning_rates, colors = (1e-3, 3e-3, 1e-2), {"AdamW": "tab:gray", "AdaHessianKron": "tab:blue"}
found = {(name, lr): train(name, lr) for name in colors for lr in learning_rates}
for (name, lr), (_, errors) in found.items():
    print(f"{name:14} lr={lr:g}: relative error {errors[-1]:.5f}")
print(f"L-BFGS: relative error {(lbfgs := train_lbfgs()):.5f}")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
with torch.no_grad():
    left.plot(points, solution(points), color="black", linewidth=4, alpha=0.25, label="solution")
    for name, color in colors.items():
        left.plot(points, predict(found[name, 3e-3][0], points), color=color, label=name)
for (name, lr), (_, errors) in found.items():
    style = dict(zip(learning_rates, (":", "-", "--"), strict=True))[lr]
    right.plot(range(10, 1501, 10), errors, style, color=colors[name], label=f"{name}, {lr:g}")
right.axhline(lbfgs, color="tab:orange", linewidth=1, label="L-BFGS at the end")
left.set(title="u(x) after 1,500 steps at lr = 0.003", xlabel="x")
right.set(title="relative error", xlabel="steps", yscale="log")
left.legend(frameon=False)
right.legend(frameon=False, fontsize="x-small", loc="lower left")
plt.show()
