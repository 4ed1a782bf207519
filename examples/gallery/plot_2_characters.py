"""
A small GPT on characters
=========================

Train a Transformer with two layers to predict the next character of English text. The text is the language reference
that every Python installation contains, so the script downloads nothing.
"""

import time
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import adahessian

torch.set_num_threads(1)
text = "\n".join(topics[name] for name in sorted(topics))
letters = sorted(set(text))
codes = torch.tensor([letters.index(letter) for letter in text])
training, test = codes.split([len(codes) * 9 // 10, len(codes) - len(codes) * 9 // 10])
LENGTH, WIDTH, HEADS = 64, 64, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters, self.places = nn.Embedding(len(letters), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(letters)))

    def forward(self, x):
        return self.layers(self.letters(x) + self.places.weight[: x.shape[1]])


def loss_fn(model, batch):
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def batch_of(codes, count):
    starts = torch.randint(len(codes) - LENGTH, (count, 1))
    return codes[starts + torch.arange(LENGTH + 1)]


# %%
# The loop
# --------
# The curvature pass selects an attention kernel that can be differentiated twice. The gradient still uses the fused
# kernel.


def train(name, lr, steps=150):
    torch.manual_seed(0)
    model = GPT()
    if name == "AdamW":
        optimizer, curvature = torch.optim.AdamW(model.parameters(), lr=lr), None
    else:
        optimizer = adahessian.AdaHessianKron(adahessian.param_groups(model), lr=lr)
        curvature = adahessian.Curvature(model, loss_fn, optimizer)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    test_batch, curve, seconds = batch_of(test, 128), [], 0.0
    for step in range(steps):
        batch = batch_of(training, 32)
        start = time.process_time()
        if curvature is not None:
            curvature.measure(batch)
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
        seconds += time.process_time() - start
        schedule.step()
        if step % 15 == 14:
            with torch.no_grad():
                curve.append((step + 1, seconds, loss_fn(model, test_batch).item()))
    return torch.tensor(curve)


# Without this call, the time to load parts of PyTorch would count as training time.
train("AdaHessianKron", lr=1e-3, steps=1)
learning_rates, colors = (1e-3, 3e-3, 1e-2), {"AdamW": "tab:gray", "AdaHessianKron": "tab:blue"}
found = {(name, lr): train(name, lr) for lr in learning_rates for name in colors}
for (name, lr), curve in found.items():
    print(f"lr={lr:g}, {name:14}: test loss {curve[-1, 2]:.3f} after {curve[-1, 1]:.1f} s of CPU time")

# %%
# The result
# ----------
# A measurement takes longer than an ordinary step, so the right panel shows the same curves by time. The loop measures
# at each of the first 50 steps, which are a third of this short run. By time, AdamW is therefore ahead at first.

figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
for (name, lr), curve in found.items():
    style = dict(zip(learning_rates, (":", "-", "--"), strict=True))[lr]
    for axis, column in zip(axes, (0, 1), strict=True):
        axis.plot(curve[:, column], curve[:, 2], style, color=colors[name], label=f"{name}, {lr:g}")
axes[0].set(xlabel="steps", ylabel="test loss")
axes[1].set(xlabel="seconds of CPU time for training")
axes[0].legend(frameon=False, fontsize="small")
plt.show()
