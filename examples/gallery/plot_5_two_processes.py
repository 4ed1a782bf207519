"""
Two processes
=============

Train once with one process, and once with two processes that share every batch. Both runs end with the same weights, up
to rounding.

The training script is :download:`ddp_worker.py <../../examples/gallery/ddp_worker.py>`. Save it in the same folder:

.. literalinclude:: ../../examples/gallery/ddp_worker.py
   :start-at: torch.set_num_threads
   :end-before: weights =

The model is wrapped in ``DistributedDataParallel``, and ``Curvature`` gets the wrapped model. Nothing else changes. All
ranks use the same probes, and average their products ``H z`` once per measurement.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

WORKER = Path("ddp_worker.py").resolve()  # run this script in its folder
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def train(*launcher):
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *launcher, WORKER, output], check=True, env=environment)
        return {name: torch.tensor(values) for name, values in json.loads(output.read_text()).items()}


one, two = train(), train(*TORCHRUN)
difference = (one["weights"] - two["weights"]).norm() / one["weights"].norm()
print(f"relative difference of the weights after {len(one['losses'])} steps: {difference:.1e}")

# %%
# The result
# ----------
# Two processes add numbers in a different order than one process, so the losses differ in their last digits.

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
left.plot(one["losses"], color="tab:blue", linewidth=6, alpha=0.3, label="one process")
left.plot(two["losses"], color="tab:blue", linewidth=1.5, label="two processes")
left.set(title="training loss", xlabel="steps", yscale="log")
left.legend(frameon=False)
right.plot((one["losses"] - two["losses"]).abs() / one["losses"], ".", color="tab:blue")
right.axhline(torch.finfo(torch.float32).eps, color="tab:gray", linewidth=1, label="precision of float32")
right.set(title="relative difference of the losses", xlabel="steps", yscale="log", ylim=(1e-9, 1e-2))
right.legend(frameon=False)
plt.show()
