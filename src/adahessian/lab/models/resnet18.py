"""ResNet18, as He et al. (2016) made it for ImageNet."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions and a shortcut, which is a 1x1 convolution where the shape changes (option B)."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or width_in != width:
            self.shortcut.append(nn.Conv2d(width_in, width, 1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Images in, images out."""
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class ResNet18(nn.Module):
    """Four stages of two blocks, of 64, 128, 256 and 512 channels.

    Args:
        classes: Number of classes.
        small_images: A first convolution of 3x3 without stride or pooling, for images of 64 x 64 or less, instead of
            one of 7x7 and pooling, which make an image of 224 x 224 one of 56 x 56.
        width: Channels of the first stage.
    """

    def __init__(self, classes: int = 1000, *, small_images: bool = False, width: int = 64) -> None:
        super().__init__()
        if small_images:
            self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
            self.pool: nn.Module = nn.Identity()
        else:
            self.conv = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
            self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        width_in = width
        for stage, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            blocks += [Block(width_in, stage, stride), Block(stage, stage, 1)]
            width_in = stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width_in, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Images of shape (N, 3, H, W) to logits of shape (N, classes)."""
        x = self.pool(F.relu(self.norm(self.conv(x))))
        x = self.blocks(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits
