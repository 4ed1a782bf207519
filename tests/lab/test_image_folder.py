from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_data import picture
from torch.nn.functional import pad

from adahessian.lab.data.image_folder import (
    StreamedImages,
    center_view,
    decode,
    list_image_folder,
    random_box,
    random_view,
)
from adahessian.lab.errors import DataError
from adahessian.lab.tasks.images import PaddedCrops

stream = partial(StreamedImages, device=torch.device("cpu"))
CENTER = partial(center_view, 16, 16)


@pytest.fixture
def folder(tmp_path):
    """Two classes, with all kinds of images that ImageNet has: gray, CMYK, and PNG with the suffix of JPEG."""
    for number, (part, name) in enumerate(product(("train", "val"), ("n02", "n01"))):
        (tmp_path / part / name).mkdir(parents=True)
        for i, suffix in enumerate(("JPEG", "jpg", "png", "JPEG")[: 4 if part == "train" else 2]):
            image = picture(10 * number + i, mode="L" if i == 1 else "RGB")
            image.save(tmp_path / part / name / f"{name}_{i}.{suffix}")
    picture(98, mode="CMYK").save(tmp_path / "train" / "n01" / "n01_0.JPEG")
    picture(99).save(tmp_path / "train" / "n01" / "n01_3.JPEG", format="PNG")
    (tmp_path / "train" / "n01" / "notes.txt").write_text("not an image")
    return tmp_path


def test_classes_are_numbered_by_name_and_all_images_become_rgb(folder):
    training, validation, classes = list_image_folder(folder)
    assert classes == ("n01", "n02")
    assert (training.labels.tolist(), validation.labels.tolist()) == ([0] * 4 + [1] * 4, [0] * 2 + [1] * 2)
    assert [Path(file).stem for file in validation.files] == ["n01_0", "n01_1", "n02_0", "n02_1"]
    assert {decode(file).mode for file in training.files} == {"RGB"}
    assert np.array_equal(np.array(decode(training.files[3])), np.array(picture(99)))


@pytest.mark.parametrize("workers", [0, 2])
def test_images_stream_in_the_requested_order(folder, workers):
    streamed = stream(list_image_folder(folder)[0], CENTER, workers=workers)
    before = torch.get_rng_state()
    (images, labels), (last, last_label) = streamed.take([torch.tensor([3, 0, 7]), torch.tensor([5])], epoch=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert (images.dtype, images.shape, last.shape) == (torch.uint8, (3, 16, 16, 3), (1, 16, 16, 3))
    assert (labels.tolist(), last_label.tolist()) == ([0, 0, 1], [1])
    # PNG is lossless, and the view has the 16 columns in the middle of 20.
    assert np.array_equal(images[0].numpy(), np.array(picture(99))[:, 2:18])
    assert torch.equal(streamed.decode_all(16)[0][[3, 0, 7]], images)


def test_random_views_are_a_function_of_seed_epoch_and_index(folder):
    def views(workers=0, seed=1, epoch=2, order=(4, 2, 0)):
        streamed = stream(list_image_folder(folder)[0], partial(random_view, 12, seed), workers=workers)
        ((images, _),) = streamed.take([torch.tensor(order)], epoch)
        return images

    assert torch.equal(views(workers=2, order=(0, 4, 2)), views()[[2, 0, 1]])
    for other in (views(seed=2), views(epoch=3)):
        assert (other != views()).flatten(1).any(1).all()


def test_views_are_parts_of_the_image():
    ramp = Image.fromarray(np.tile(np.arange(0, 240, 5, dtype=np.uint8)[:, None], (40, 1, 3)))
    steps = [np.diff(np.array(random_view(8, 0, ramp, 0, index))[0, :, 0].astype(int)) for index in range(400)]
    assert all((step >= 0).all() or (step <= 0).all() for step in steps)
    # Half of the views are mirrored, within four standard deviations.
    assert 160 < sum(step.sum() < 0 for step in steps) < 240
    image = picture(0, size=(40, 80))
    scaled = image.resize((24, 48), Image.Resampling.BILINEAR).crop((2, 14, 22, 34))
    assert np.array_equal(np.array(center_view(20, 24, image, 0, 0)), np.array(scaled))


def test_random_boxes_have_all_allowed_shapes():
    generator = torch.Generator().manual_seed(0)
    boxes = torch.tensor([random_box(300, 200, generator) for _ in range(1000)]).double()
    left, upper, right, lower = boxes.T
    assert ((left >= 0) & (left < right) & (right <= 300) & (upper >= 0) & (upper < lower) & (lower <= 200)).all()
    areas, ratios = (right - left) * (lower - upper) / 60_000, (right - left) / (lower - upper)
    # Sides are rounded to pixels.
    assert 0.075 < areas.min() < 0.1 < 0.8 < areas.max() <= 1
    assert 0.73 < ratios.min() < 0.78 < 1.28 < ratios.max() < 1.36
    # Without room for such a box, it is in the middle.
    assert random_box(1000, 10, generator) == (493, 0, 506, 10)


def test_crops_are_the_views_of_the_padded_image():
    images, crops = torch.arange(1.0, 151.0).view(2, 5, 5, 3), PaddedCrops(5, padding=2)
    padded = pad(images, (0, 0, 2, 2, 2, 2))
    windows = [padded[:, y : y + 5, x : x + 5] for y in range(5) for x in range(5)]
    expected = [window for each in windows for window in (each, each.flip(2))]
    seen = set()
    for view in range(50):
        views = torch.tensor([view, view])
        cropped = torch.mul(*crops.crop(images, views))
        seen |= {number for number, window in enumerate(expected) if torch.equal(window, cropped)}
    assert len(seen) == 50
    counts = crops.draw(50 * 400, torch.Generator().manual_seed(0)).bincount(minlength=50)
    # Chi squared with 49 degrees of freedom has a standard deviation of 10.
    assert 9 < ((counts - 400) ** 2 / 400).sum() < 89


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("damage", ["truncated", "GIF"])
def test_a_file_cannot_be_decoded(folder, workers, damage):
    file = folder / "train" / "n02" / "n02_0.JPEG"
    if damage == "GIF":
        picture(0).save(file, format="GIF")
    else:
        file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(DataError, match=r"^\S*n02_0\.JPEG [^\n]*$"):  # without the traceback of a worker
        list(stream(list_image_folder(folder)[0], CENTER, workers=workers).take(torch.arange(8).split(4), epoch=0))


@pytest.mark.parametrize(("renamed", "to"), [("val", "other"), ("val/n01", "val/n03"), ("train/n01", "train/n02/n01")])
def test_the_folder_has_another_layout(folder, renamed, to):
    (folder / renamed).rename(folder / to)
    with pytest.raises(DataError, match="val"):
        list_image_folder(folder)


def test_a_class_has_no_images(folder):
    for file in (folder / "val" / "n02").iterdir():
        file.rename(file.with_suffix(".gif"))
    with pytest.raises(DataError, match="n02"):
        list_image_folder(folder)
