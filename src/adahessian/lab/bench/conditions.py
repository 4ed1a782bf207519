"""What all cells of a benchmark have in common."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from adahessian.lab.bench import workloads
from adahessian.lab.bench.workloads import Workload, WorkloadName

DeviceName = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Where and how everything is measured, the same for everybody."""

    device: DeviceName
    channels_last: bool
    """Whether images and the weights of convolutions lie in memory with their channels last."""

    seed: int

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"

    @property
    def workloads(self) -> dict[WorkloadName, Workload]:
        """What is trained, at sizes that fit the device."""
        return workloads.GPU_WORKLOADS if self.on_gpu else workloads.CPU_WORKLOADS

    def set_up(self) -> None:
        """Let a GPU compute as fast as its users let it: in TF32, and with the fastest algorithm for a convolution."""
        if self.on_gpu:
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True
            torch.backends.cudnn.benchmark = True

    def record(self) -> dict[str, Any]:
        """These conditions, for a file of results."""
        return {
            **asdict(self),
            "tf32": self.on_gpu,
            "cudnn_benchmark": self.on_gpu,
            "workloads": {name: asdict(workload) for name, workload in self.workloads.items()},
        }
