"""Random crops and flips of images, drawn from a given generator."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class PaddedCrops:
    """Random crops of padded images as large as the images were, and half of them mirrored.

    There are few such views of an image, so all of them are written down once, as the places that the pixels come
    from. A whole batch is then drawn in one call, and made by looking up.

    Args:
        size: Height and width of the images.
        padding: Pixels added at each side. They are zero.
        device: Where the images are.
    """

    def __init__(self, size: int, *, padding: int = 4, device: torch.device | str = "cpu") -> None:
        lines = torch.arange(-padding, padding + 1)[:, None] + torch.arange(size)
        inside = (lines >= 0) & (lines < size)
        lines = lines.clamp(0, size - 1)
        rows, row_inside = lines[None, :, None, :, None], inside[None, :, None, :, None]
        columns = torch.stack((lines, lines.flip(1)))[:, None, :, None, :]
        column_inside = torch.stack((inside, inside.flip(1)))[:, None, :, None, :]
        self._pixels = (rows * size + columns).flatten(0, 2).flatten(1).to(device)
        self._inside = (row_inside & column_inside).float().flatten(0, 2).unsqueeze(3).to(device)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """The numbers of as many views, each as likely as any other."""
        return torch.randint(len(self._pixels), (count,), generator=generator, device=self._pixels.device)

    def crop(self, images: Tensor, views: Tensor) -> Tensor:
        """The images' pixels in these views, with those at the border repeated where the padding is.

        Args:
            images: Of shape (N, size, size, channels).
            views: A number for each.
        """
        count, height, width, channels = images.shape
        pixels = self._pixels[views].unsqueeze(2).expand(-1, -1, channels)
        return images.reshape(count, height * width, channels).gather(1, pixels).view(images.shape)

    def inside(self, views: Tensor) -> Tensor:
        """1 where these views show the image and 0 where they show the padding, of shape (N, size, size, 1)."""
        return self._inside[views]


def random_box(width: int, height: int, generator: torch.Generator) -> tuple[int, int, int, int]:
    """A random part of an image, of 8% to all of its area and 3 : 4 to 4 : 3 wide, as is usual for ImageNet.

    Args:
        width: Of the image.
        height: Of the image.
        generator: Decides.

    Returns:
        Its left, upper, right and lower edges. Where ten draws do not fit into the image, the largest part in the
        middle that is not too wide or too high.
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
