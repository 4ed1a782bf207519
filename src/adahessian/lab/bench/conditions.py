"""What all cells of a benchmark have in common."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Where and how everything is measured, the same for everybody."""

    device: str
    channels_last: bool
    """Whether images and the weights of convolutions lie in memory with their channels last."""

    seed: int

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return torch.device(self.device).type == "cuda"

    def set_up(self) -> None:
        """Let a GPU compute as fast as users let it: TF32, and convolutions by their fastest algorithm."""
        if self.on_gpu:
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True
            torch.backends.cudnn.benchmark = True

    def record(self) -> dict[str, Any]:
        """These conditions, for a file of results."""
        return {**asdict(self), "tf32": self.on_gpu, "cudnn_benchmark": self.on_gpu}
