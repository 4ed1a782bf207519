"""
A small convolutional network on digits
=======================================

Train the same network on scikit-learn's handwritten digits with AdamW and with AdaHessianKron. Both optimizers get the
same learning rates, weight decay, batches and initial weights.
"""

import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import adahessian

torch.set_num_threads(1)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_images, test_images = images.split([1200, 597])
train_labels, test_labels = labels.split([1200, 597])


def make_model():
    convolutions = (nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU())
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


def loss_fn(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


# %%
# The loop
# --------
# In the loop, the two optimizers differ only in the call of ``curvature.measure(batch)``. It measures at each of the
# first 50 steps and then every ten steps, on a quarter of the batch.


def train(name, lr, seed, steps=250):
    torch.manual_seed(seed)
    model = make_model()
    if name == "AdamW":
        optimizer, curvature = torch.optim.AdamW(model.parameters(), lr=lr), None
    else:
        optimizer = adahessian.AdaHessianKron(adahessian.param_groups(model), lr=lr)
        curvature = adahessian.Curvature(model, loss_fn, optimizer)
    curve, seconds = [], 0.0
    for step in range(steps + 1):
        if step % 10 == 0:
            with torch.no_grad():
                error = (model(test_images).argmax(1) != test_labels).float().mean().item()
            curve.append((step, seconds, 100 * error))
        chosen = torch.randint(len(train_images), (64,))
        batch = train_images[chosen], train_labels[chosen]
        start = time.process_time()
        if curvature is not None:
            curvature.measure(batch)
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
        seconds += time.process_time() - start
    return torch.tensor(curve)


train("AdaHessianKron", lr=1e-3, seed=0, steps=1)  # loads parts of PyTorch, which takes a second
learning_rates, names = (1e-3, 3e-2), ("AdamW", "AdaHessianKron")
curves = {
    (name, lr): torch.stack([train(name, lr, seed) for seed in range(3)]) for lr in learning_rates for name in names
}

# %%
# The result
# ----------
# Lines are means over three seeds, and bands reach from the best to the worst seed. At the small learning rate,
# AdaHessianKron needs fewer steps. At the large learning rate, both optimizers reach about the same error. A step of
# this network takes a fraction of a millisecond. Compared with that, the fixed cost of a measurement is large, so AdamW
# needs less time.

figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharey=True, layout="constrained")
for row, lr in zip(axes, learning_rates, strict=True):
    for name, color in zip(names, ("tab:gray", "tab:blue"), strict=True):
        found = curves[name, lr]
        for axis, column in zip(row, (0, 1), strict=True):
            x, errors = found[..., column].mean(0), found[..., 2]
            axis.plot(x, errors.mean(0), color=color, label=name)
            axis.fill_between(x, errors.amin(0), errors.amax(0), color=color, alpha=0.2, linewidth=0)
        print(f"lr={lr:g}, {name:14}: {errors[:, -1].mean():.1f} % test errors after {x[-1]:.1f} s of CPU time")
    row[0].set(ylabel="test errors, %", yscale="log", title=f"lr = {lr:g}, by steps")
    row[1].set(title=f"lr = {lr:g}, by time")
axes[1, 0].set_xlabel("steps")
axes[1, 1].set_xlabel("seconds of CPU time for training")
axes[0, 0].legend(frameon=False)
plt.show()
