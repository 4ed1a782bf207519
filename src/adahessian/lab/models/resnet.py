"""ResNets of He et al. (2016): ResNet20 and its kin for images of 32 x 32, and ResNet18 for ImageNet."""

from itertools import pairwise

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from adahessian.lab.errors import ConfigError


class Block(nn.Module):
    """Two convolutions and a shortcut, which pads with zero channels (option A) or projects (option B)."""

    def __init__(self, width_in: int, width: int, project: bool) -> None:
        super().__init__()
        stride = 1 if width_in == width else 2  # a block that widens also halves height and width
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.new_channels = width - width_in
        self.projection = nn.Sequential()
        if self.new_channels and project:
            self.projection.extend([nn.Conv2d(width_in, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)])

    def forward(self, x: Tensor) -> Tensor:
        if self.new_channels and not self.projection:
            before = self.new_channels // 2
            shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, before, self.new_channels - before))
        else:
            shortcut = self.projection(x)
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + shortcut)


class _Stages(nn.Module):
    """A first convolution, stages of blocks, the mean over all pixels and a linear layer. A stage doubles the width."""

    def __init__(self, conv: nn.Conv2d, pool: nn.Module, project: bool, stages: int, blocks: int, classes: int) -> None:
        super().__init__()
        self.conv, self.pool, self.norm = conv, pool, nn.BatchNorm2d(conv.out_channels)
        widths = [conv.out_channels * 2**stage for stage in range(stages) for _ in range(blocks)]
        pairs = pairwise([conv.out_channels, *widths])
        self.blocks = nn.Sequential(*(Block(*sizes, project) for sizes in pairs))
        self.head = nn.Linear(widths[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: Tensor) -> Tensor:
        """Map images of shape (N, 3, H, W) to logits of shape (N, classes)."""
        x = self.pool(F.relu(self.norm(self.conv(x))))
        logits: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return logits


class ResNet(_Stages):
    """ResNet for CIFAR-10, with three stages of 16, 32 and 64 channels. Shortcuts pad with zeros.

    The last layer uses torch's default initialization, as in the experiments of AdaHessian's authors. With larger
    weights, some classes are almost certain. Their curvature is close to 0, and AdaHessian's first step divides by it.
    """

    def __init__(self, depth: int = 20, classes: int = 10) -> None:
        if depth < 8 or (depth - 2) % 6:
            raise ConfigError(f"--depth {depth} is invalid. Pass 6 n + 2, such as 20 or 32.")
        conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        super().__init__(conv, nn.Identity(), project=False, stages=3, blocks=(depth - 2) // 6, classes=classes)


class ResNet18(_Stages):
    """ResNet18, with four stages of two blocks: 64, 128, 256 and 512 channels. Shortcuts project.

    Images start with a convolution of 7x7 and pooling, which reduce 224 x 224 to 56 x 56. Those of 64 x 64 or less
    (``small_images``) start with a convolution of 3x3 without stride or pooling.
    """

    def __init__(self, classes: int = 1000, *, small_images: bool = False, width: int = 64) -> None:
        kernel, stride, pool = (3, 1, nn.Identity()) if small_images else (7, 2, nn.MaxPool2d(3, stride=2, padding=1))
        conv = nn.Conv2d(3, width, kernel, stride=stride, padding=kernel // 2, bias=False)
        super().__init__(conv, pool, project=True, stages=4, blocks=2, classes=classes)
