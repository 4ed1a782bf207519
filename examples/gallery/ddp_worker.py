"""Train on this rank's share of the digits. ``torchrun`` or ``plot_5_two_processes.py`` starts this script."""

import json
import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import adahessian

BATCH, STEPS = 64, 100


def loss_fn(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


torch.set_num_threads(1)
is_launched = "RANK" in os.environ
if is_launched:
    distributed.init_process_group("gloo")
rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if is_launched else (0, 1)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

torch.manual_seed(0)  # the same weights and the same batches on every rank
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
wrapped = DistributedDataParallel(model) if is_launched else model
optimizer = adahessian.AdaHessianKron(adahessian.param_groups(wrapped), lr=1e-2)
# The ranks share each measurement. With the whole batch, they measure the same examples as a single process.
curvature = adahessian.Curvature(wrapped, loss_fn, optimizer, batch_fraction=1.0)

losses = []
for _ in range(STEPS):
    chosen = torch.randint(len(images), (BATCH,))
    share = chosen[rank::ranks]  # of two ranks, each gets every second example
    curvature.measure((images[share], labels[share]))
    optimizer.zero_grad()
    loss_fn(wrapped, (images[share], labels[share])).backward()
    optimizer.step()
    with torch.no_grad():
        losses.append(loss_fn(model, (images, labels)).item())
weights = nn.utils.parameters_to_vector(model.parameters())
if rank == 0:
    with open(sys.argv[1], "w") as file:
        json.dump({"losses": losses, "weights": weights.tolist()}, file)
if is_launched:
    distributed.destroy_process_group()
