"""Random crops and flips of images, drawn from a given generator."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad


class PaddedCrops:
    """Random crops of images with some zero pixels on each side, as large as the images. Half of them are mirrored.

    There are few such views of an image, so a table holds the source of each pixel of each view. A whole batch is then
    drawn in one call and gathered.
    """

    def __init__(self, size: int, *, padding: int = 4, device: torch.device | str = "cpu") -> None:
        def views(padded: Tensor) -> Tensor:
            windows = padded[0, 0].unfold(0, size, 1).unfold(1, size, 1)
            return torch.stack((windows, windows.flip(3))).flatten(0, 2).to(device)

        pixels, sides = torch.arange(float(size**2)).view(1, 1, size, size), [padding] * 4
        self._pixels = views(pad(pixels, sides, mode="replicate").long()).flatten(1)
        self._inside = views(pad(torch.ones_like(pixels), sides)).unsqueeze(3)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw numbers of views, all with the same probability."""
        return torch.randint(len(self._pixels), (count,), generator=generator, device=self._pixels.device)

    def crop(self, images: Tensor, views: Tensor) -> Tensor:
        """Return one view per image of shape (N, size, size, channels). Padding repeats the pixels at the border."""
        count, height, width, channels = images.shape
        pixels = self._pixels[views].unsqueeze(2).expand(-1, -1, channels)
        return images.reshape(count, height * width, channels).gather(1, pixels).view(images.shape)

    def inside(self, views: Tensor) -> Tensor:
        """Return 1 where a view shows the image and 0 where it shows padding, of shape (N, size, size, 1)."""
        return self._inside[views]


def random_box(width: int, height: int, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Return the left, upper, right and lower edge of a part with 8% to 100% of an image and a ratio of 3:4 to 4:3.

    This is usual for ImageNet. If ten draws do not fit into the image, it is the largest such part in the middle.
    """
    narrowest, widest = 3 / 4, 4 / 3
    for area, ratio, across, down in torch.rand(10, 4, generator=generator, dtype=torch.float64).tolist():
        wanted = width * height * (0.08 + 0.92 * area)
        shape = math.exp(math.log(narrowest) + ratio * math.log(widest / narrowest))
        box_width, box_height = round(math.sqrt(wanted * shape)), round(math.sqrt(wanted / shape))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, upper = int(across * (width - box_width + 1)), int(down * (height - box_height + 1))
            return left, upper, left + box_width, upper + box_height
    box_width, box_height = min(width, round(height * widest)), min(height, round(width / narrowest))
    left, upper = (width - box_width) // 2, (height - box_height) // 2
    return left, upper, left + box_width, upper + box_height
