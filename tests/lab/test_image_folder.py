import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from adahessian.lab.augmentation import random_box
from adahessian.lab.data.errors import DataError
from adahessian.lab.data.image_folder import Centre, RandomPart, StreamedImages, decode, list_image_folder

CPU = torch.device("cpu")


def picture(seed, size=(20, 16), mode="RGB"):
    width, height = size
    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.fixture
def folder(tmp_path):
    """Two classes; one image of each kind that ImageNet has: grey, CMYK, PNG under a name of JPEG."""
    for part, count in (("train", 4), ("val", 2)):
        for number, name in enumerate(("n02", "n01")):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                mode = "L" if i == 1 else "RGB"
                file = tmp_path / part / name / f"{name}_{i}.{('JPEG', 'jpg', 'png', 'JPEG')[i]}"
                picture(10 * number + i, mode=mode).save(file)
    picture(98, mode="CMYK").save(tmp_path / "train" / "n01" / "n01_0.JPEG")
    picture(99).save(tmp_path / "train" / "n01" / "n01_3.JPEG", format="PNG")
    (tmp_path / "train" / "n01" / "notes.txt").write_text("no image")
    return tmp_path


def images_of(streamed, parts, epoch=0):
    return [images for images, _ in streamed.take(parts, epoch)]


def test_classes_are_numbered_by_name(folder):
    training, validation, classes = list_image_folder(folder)
    assert classes == ("n01", "n02")
    assert training.labels.tolist() == [0] * 4 + [1] * 4
    assert validation.labels.tolist() == [0] * 2 + [1] * 2
    names = [Path(file).name for file in validation.files]
    assert names == ["n01_0.JPEG", "n01_1.jpg", "n02_0.JPEG", "n02_1.jpg"]


def test_all_kinds_of_images_are_rgb(folder):
    training, _, _ = list_image_folder(folder)
    assert {decode(file).mode for file in training.files} == {"RGB"}
    assert np.array_equal(np.array(decode(training.files[3])), np.array(picture(99)))
    grey = np.array(decode(training.files[1]))
    assert (grey == grey[:, :, :1]).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_in_the_order_asked_for(folder, workers):
    training, _, _ = list_image_folder(folder)
    streamed = StreamedImages(training, Centre(16, 16), workers=workers, device=CPU)
    parts = [torch.tensor([3, 0, 7]), torch.tensor([5])]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    (images, labels), (last, last_label) = streamed.take(parts, epoch=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert (images.dtype, images.shape, last.shape) == (torch.uint8, (3, 16, 16, 3), (1, 16, 16, 3))
    assert (labels.tolist(), last_label.tolist()) == ([0, 0, 1], [1])
    # A PNG loses nothing, and 16 of 20 columns in the middle are left of it.
    assert np.array_equal(images[0].numpy(), np.array(picture(99))[:, 2:18])
    assert torch.equal(streamed.decoded()[[3, 0, 7]], images)


def test_random_parts_are_a_function_of_seed_epoch_and_index(folder):
    training, _, _ = list_image_folder(folder)

    def first(workers=0, seed=1, epoch=2, parts=((4, 2), (0,))):
        streamed = StreamedImages(training, RandomPart(12, seed), workers=workers, device=CPU)
        return {
            index: image
            for part, images in zip(parts, images_of(streamed, [torch.tensor(p) for p in parts], epoch), strict=True)
            for index, image in zip(part, images, strict=True)
        }

    expected = first()
    for other in (first(workers=2), first(parts=((0, 4), (2,)))):
        assert all(torch.equal(other[index], expected[index]) for index in expected)
    for other in (first(seed=2), first(epoch=3)):
        assert not any(torch.equal(other[index], expected[index]) for index in expected)


def test_half_of_the_random_parts_are_mirrored():
    ramp = Image.fromarray(np.tile(np.arange(0, 240, 5, dtype=np.uint8)[:, None], (40, 1, 3)))
    view = RandomPart(8, 0)
    parts = [np.array(view(ramp, epoch=0, index=index))[:, :, 0].astype(int) for index in range(400)]
    mirrored = [bool(part[0, 0] > part[0, -1]) for part in parts]
    assert all((np.diff(part[0]) * (-1 if flip else 1) >= 0).all() for part, flip in zip(parts, mirrored, strict=True))
    # Within four standard deviations of a half.
    assert 160 < sum(mirrored) < 240


def test_random_boxes_are_within_the_image_and_of_all_allowed_shapes():
    generator = torch.Generator().manual_seed(0)
    areas, ratios = [], []
    for _ in range(1000):
        left, upper, right, lower = random_box(300, 200, generator)
        assert 0 <= left < right <= 300
        assert 0 <= upper < lower <= 200
        areas.append((right - left) * (lower - upper) / 60000)
        ratios.append((right - left) / (lower - upper))
    # Sides are rounded to pixels.
    assert 0.075 < min(areas) < 0.1
    assert 0.8 < max(areas) <= 1
    assert 0.73 < min(ratios) < 0.78
    assert 1.28 < max(ratios) < 1.36


@pytest.mark.parametrize(("size", "box"), [((1000, 10), (493, 0, 506, 10)), ((10, 1000), (0, 493, 10, 506))])
def test_an_image_too_long_for_any_box_gives_its_middle(size, box):
    assert random_box(*size, torch.Generator().manual_seed(0)) == box


def test_the_centre_is_scaled_by_the_shorter_side():
    image = picture(0, size=(40, 80))
    assert Centre(20, 24)(image, epoch=0, index=0).size == (20, 20)
    scaled = image.resize((24, 48), Image.Resampling.BILINEAR).crop((2, 14, 22, 34))
    assert np.array_equal(np.array(Centre(20, 24)(image, epoch=0, index=0)), np.array(scaled))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_cannot_be_decoded(folder, workers):
    file = folder / "train" / "n02" / "n02_0.JPEG"
    file.write_bytes(file.read_bytes()[:200])
    training, _, _ = list_image_folder(folder)
    streamed = StreamedImages(training, Centre(16, 16), workers=workers, device=CPU)
    with pytest.raises(DataError, match=r"^\S*n02_0.JPEG cannot be decoded .*Fetch it again, or leave it out.$"):
        images_of(streamed, torch.arange(8).split(4))


def test_no_other_format_is_decoded(folder):
    content = io.BytesIO()
    picture(0).save(content, format="GIF")
    file = folder / "train" / "n02" / "n02_0.JPEG"
    file.write_bytes(content.getvalue())
    with pytest.raises(DataError, match=r"n02_0.JPEG cannot be decoded"):
        decode(str(file))


def test_a_part_is_missing(folder):
    (folder / "val").rename(folder / "validation")
    with pytest.raises(DataError, match=r"No folder .*val: expected train/<class>/\*.JPEG and val/<class>/\*.JPEG"):
        list_image_folder(folder)


def test_a_part_is_not_sorted_into_classes(tmp_path):
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
    picture(0).save(tmp_path / "train" / "1.JPEG")
    with pytest.raises(DataError, match="train has no folders: sort its images into a folder for each class"):
        list_image_folder(tmp_path)


def test_a_class_has_no_images(folder):
    (folder / "train" / "n03").mkdir()
    with pytest.raises(DataError, match=r"n03 has no .JPEG, .jpg or .png files"):
        list_image_folder(folder)


def test_a_class_is_not_trained_on(folder):
    (folder / "val" / "n03").mkdir()
    with pytest.raises(DataError, match=r"val/n03 has no folder of its name in .*train"):
        list_image_folder(folder)
