"""ResNet20 and ResNet32 for images of 32 x 32, as He et al. (2016) made them for CIFAR-10.

Weights begin as in AdaHessian's own experiments: convolutions by their outputs, the last layer as torch has it. With a
larger last layer the first logits are far apart, some classes all but certain and the curvature next to nothing, and
AdaHessian's first step, which divides by it, throws the loss far up.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions and a shortcut, which pads with zero channels where the width grows (option A)."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        stride = 1 if width_in == width else 2
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.new_channels = width - width_in

    def forward(self, x: Tensor) -> Tensor:
        """Images in, images out."""
        shortcut = x
        if self.new_channels:
            before = self.new_channels // 2
            shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, before, self.new_channels - before))
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + shortcut)


class ResNet(nn.Module):
    """Three stages of 16, 32 and 64 channels.

    Args:
        depth: Number of layers, 6 n + 2: 20, 32, 44, ...
        classes: Number of classes.
        width: Channels of the first stage.
    """

    def __init__(self, depth: int = 20, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"Invalid depth: {depth}. It must be 6 n + 2, such as 20 or 32.")
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        width_in = width
        for stage in (width, 2 * width, 4 * width):
            for _ in range((depth - 2) // 6):
                blocks.append(Block(width_in, stage))
                width_in = stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width_in, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: Tensor) -> Tensor:
        """Images of shape (N, 3, H, W) to logits of shape (N, classes)."""
        x = F.relu(self.norm(self.conv(x)))
        x = self.blocks(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits
