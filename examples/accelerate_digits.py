"""Train on handwritten digits with accelerate: accumulated gradients, clipping, a schedule, a checkpoint.

Run it on one device or on two GPUs::

    pip install "adahessian[accelerate]" scikit-learn
    python accelerate_digits.py
    accelerate launch --num_processes 2 accelerate_digits.py
"""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import adahessian
from adahessian.integrations.accelerate import prepare_curvature

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--folder", default="digits_checkpoint", help="folder of the checkpoint")
args = parser.parse_args()

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
train_set, test_set = random_split(TensorDataset(images, torch.tensor(digits.target)), [1437, 360])

net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
)
optimizer = adahessian.AdaHessian(adahessian.param_groups(net), lr=0.15, eps=1e-2, curvature_every=2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.15, total_steps=args.epochs * 23)

accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
    net, optimizer, scheduler, DataLoader(train_set, 32, shuffle=True), DataLoader(test_set, 90)
)


def loss_fn(model, batch):
    """Return the mean loss of a batch."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


curvature = prepare_curvature(accelerator, model, loss_fn, optimizer)

for epoch in range(args.epochs):
    model.train()
    for batch in train_loader:
        with accelerator.accumulate(model):
            curvature.measure(batch)  # the one new line in the loop
            loss = loss_fn(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

accelerator.save_state(args.folder)  # accelerator.load_state resumes from it bit for bit
model.eval()
right = []
with torch.no_grad():
    for images, labels in test_loader:
        right.append(accelerator.gather_for_metrics(model(images).argmax(1) == labels))
accelerator.print(f"accuracy {torch.cat(right).float().mean():.3f}")
accelerator.end_training()
