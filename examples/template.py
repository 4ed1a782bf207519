"""A plain training loop: several GPUs, bfloat16, accumulation, clipping, a schedule, an EMA, bit-exact resume.

    pip install adahessian scikit-learn
    python template.py                                # one process
    torchrun --nproc-per-node 2 template.py           # two processes, each with its own batches

The script saves checkpoint.pt in the current folder. You can stop it at any time. If you start it again, it resumes bit
for bit.
"""

import os
from contextlib import nullcontext
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import adahessian

STEPS, SAVE_EVERY, MICRO_BATCHES, MICRO_BATCH_SIZE = 200, 20, 2, 32
CHECKPOINT = Path("checkpoint.pt")

device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
if launched := distributed.is_torchelastic_launched():
    distributed.init_process_group()
rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if launched else (0, 1)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
labels = torch.tensor(digits.target, device=device)
(images, test_images), (labels, test_labels) = images.split([1497, 300]), labels.split([1497, 300])

torch.manual_seed(0)
layers = (nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2))
network = nn.Sequential(*layers, nn.Linear(32 * 4 * 4, 10)).to(device)
model = DistributedDataParallel(network) if launched else network


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a batch, for the gradient and for the curvature."""
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return cross_entropy(model(batch[0]), batch[1])


optimizer = adahessian.AdaHessian(adahessian.param_groups(network), lr=0.2, curvature_every=5, curvature_warmup=20)
curvature = adahessian.Curvature(model, loss_fn, optimizer)
schedule = OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS)
ema = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.95))

parts, first_step = {"model": network, "optimizer": optimizer, "schedule": schedule, "ema": ema}, 0
if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT, map_location=device, weights_only=True)
    first_step = saved["step"]
    for name, part in parts.items():
        part.load_state_dict(saved[name])

for step in range(first_step, STEPS):
    # Batches and dropout depend only on the step and the rank, so the checkpoint needs no random state.
    torch.manual_seed(step * ranks + rank)
    optimizer.zero_grad()
    for micro in range(MICRO_BATCHES):
        chosen = torch.randint(len(images), (MICRO_BATCH_SIZE,), device=device)
        batch = images[chosen], labels[chosen]
        curvature.measure(batch)  # averages the micro-batches of a step
        is_last = micro == MICRO_BATCHES - 1
        with nullcontext() if is_last or not launched else model.no_sync():
            loss = loss_fn(model, batch) / MICRO_BATCHES
            loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    ema.update_parameters(network)
    if rank == 0 and (step + 1) % SAVE_EVERY == 0:
        unfinished = CHECKPOINT.with_suffix(".new")
        torch.save({"step": step + 1, **{name: part.state_dict() for name, part in parts.items()}}, unfinished)
        unfinished.replace(CHECKPOINT)  # atomic, so that there is always a complete checkpoint

if rank == 0:
    with torch.no_grad():
        accuracy = (ema.eval()(test_images).argmax(1) == test_labels).float().mean().item()
    print(f"{ranks} process(es), step {STEPS}: {accuracy:.1%} of the test digits")
if launched:
    distributed.destroy_process_group()
