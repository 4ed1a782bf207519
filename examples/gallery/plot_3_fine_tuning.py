"""
Fine-tuning a small network
===========================

Train a network on upright digits. Then fine-tune it on a few digits that are turned by 90 degrees. The pretrained
network has never seen turned digits.
"""

import copy

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import adahessian

torch.set_num_threads(1)
digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
labels = torch.tensor(digits.target)[order]
turned = images.rot90(dims=(2, 3))
TUNING, TEST = slice(1000, 1200), slice(1200, None)


def loss_fn(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


# %%
# Pretraining
# -----------

torch.manual_seed(0)
convolutions = (nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU())
pretrained = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracy(model, images):
    with torch.no_grad():
        return 100 * (model(images[TEST]).argmax(1) == labels[TEST]).float().mean().item()


optimizer = torch.optim.AdamW(pretrained.parameters(), lr=3e-3)
for _ in range(300):
    chosen = torch.randint(1000, (64,))
    optimizer.zero_grad()
    loss_fn(pretrained, (images[chosen], labels[chosen])).backward()
    optimizer.step()
print(f"{accuracy(pretrained, images):.1f} % of upright digits, {accuracy(pretrained, turned):.1f} % of turned digits")

# %%
# Fine-tuning
# -----------
# Both optimizers start from a copy of the same network and train on the same 200 turned digits. The first 50 of the 60
# steps all measure the curvature. ``curvature_warmup`` sets their number.


def tune(name, lr, seed, steps=60):
    torch.manual_seed(seed)
    model, curvature = copy.deepcopy(pretrained), None
    if name == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    else:
        optimizer = adahessian.AdaHessianKron(adahessian.param_groups(model), lr=lr)
        curvature = adahessian.Curvature(model, loss_fn, optimizer)
    curve = [accuracy(model, turned)]
    for _ in range(steps):
        chosen = torch.randint(TUNING.start, TUNING.stop, (32,))
        batch = turned[chosen], labels[chosen]
        if curvature is not None:
            curvature.measure(batch)
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
        curve.append(accuracy(model, turned))
    return curve


# %%
# The result
# ----------
# Lines are means over three seeds, and bands reach from the worst to the best seed. On MiniLM, a larger pretrained
# network, the two optimizers are nearly equal, as the README shows.

learning_rates, colors = (3e-4, 1e-3, 1e-2), {"AdamW": "tab:gray", "AdaHessianKron": "tab:blue"}
figure, axes = plt.subplots(1, 3, figsize=(9, 3.4), sharey=True, layout="constrained")
for axis, lr in zip(axes, learning_rates, strict=True):
    for name, color in colors.items():
        curves = torch.tensor([tune(name, lr, seed) for seed in range(3)])
        axis.plot(curves.mean(0), color=color, label=name)
        axis.fill_between(range(61), curves.amin(0), curves.amax(0), color=color, alpha=0.2, linewidth=0)
        print(f"lr={lr:g}, {name:14}: {curves[:, -1].mean():.1f} ± {curves[:, -1].std():.1f} % of turned digits")
    axis.set(title=f"lr = {lr:g}", xlabel="steps of fine-tuning")
axes[0].set_ylabel("accuracy on turned digits, %")
axes[0].legend(frameon=False, loc="lower right")
plt.show()
