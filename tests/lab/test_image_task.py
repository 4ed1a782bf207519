import copy

import pytest
import torch
from small_tasks import alike, load
from tiny_data import cifar10_examples, write_cifar10, write_image_folder
from torch.nn.functional import cross_entropy

from adahessian.lab.tasks import images
from adahessian.lab.tasks.images import moments, normalization


@pytest.fixture
def task(tmp_path):
    write_cifar10(tmp_path)
    return load("cifar10-resnet20", tmp_path, batch_size=5)


@pytest.mark.parametrize("constant", [False, True])
def test_images_get_mean_0_and_deviation_1(constant):
    pixels = torch.randint(10, 200, (40, 6, 6, 3), dtype=torch.uint8)
    pixels[..., 1] = 7 if constant else pixels[..., 1] // 3
    found = normalization(*moments(pixels), pixels.device)(pixels)
    torch.testing.assert_close(found.mean((0, 1, 2)), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.std((0, 1, 2), correction=0), torch.tensor([1.0, 0.0 if constant else 1.0, 1.0]))


def test_an_epoch_has_every_image_once_with_its_label(task, monkeypatch):
    inputs, _ = next(task.batches(0))
    outside = (inputs == 0).all(1)  # padding, after the normalization
    assert outside.any()
    assert torch.equal(outside, outside.all(2, keepdim=True) | outside.all(1, keepdim=True))
    monkeypatch.setattr(task.crops, "draw", lambda count, generator: torch.full((count,), 40))  # the middle
    inputs, labels = map(torch.cat, zip(*task.batches(0), strict=True))
    expected = task.inputs(task.parts["training"].images)
    places = torch.tensor([int((expected == each).flatten(1).all(1).nonzero()) for each in inputs])
    assert places.sort().values.tolist() == list(range(15))
    assert torch.equal(labels, torch.cat([cifar10_examples(seed)[1] for seed in range(5)])[places])


def test_images_on_the_device_and_from_workers_are_the_same(tmp_path):
    write_image_folder(tmp_path)
    held = load("image-folder-resnet18", tmp_path)
    for workers in (0, 2):
        streamed = load("image-folder-resnet18", tmp_path, workers=workers, cache_gib=0.0)
        assert type(streamed.parts["training"]) is not type(held.parts["training"])
        for skip in (0, 2):
            assert alike(list(streamed.batches(1, skip)), list(held.batches(1, skip)))


@pytest.fixture
def model(task):
    """A network whose running statistics do not fit its weights."""
    model = task.build_model().eval()
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.uniform_(-2, 2)
    return model


@torch.no_grad()
def test_accuracy_and_loss_are_those_of_the_logits(task, model):
    task.eval_batch_size = 2
    test = task.parts["test"]
    inputs = task.inputs(test.images)
    for shift, accuracy in ((0, 100), (1, 0)):
        test.labels = (model(inputs).argmax(1) + shift) % 10
        found = task.evaluate(model)
        assert found["test_accuracy"] == accuracy
        assert found["test_loss"] == pytest.approx(cross_entropy(model(inputs), test.labels).item(), rel=1e-5)
    test.labels = task.with_recomputed_statistics(model)(inputs).argmax(1)
    assert task.evaluate(model)["test_accuracy_recomputed"] == 100


@torch.no_grad()
@pytest.mark.parametrize(("views", "count"), [(5, 1), (6, 2), (1000, 3)])
def test_recomputed_statistics_are_means_over_training_batches(task, model, monkeypatch, views, count):
    monkeypatch.setattr(images, "_STATISTICS_VIEWS", views)
    before = copy.deepcopy(model.state_dict())
    norm = task.with_recomputed_statistics(model).norm
    hidden = [model.conv(inputs) for inputs, _ in list(task.batches(0))[:count]]
    torch.testing.assert_close(norm.running_mean, torch.stack([each.mean((0, 2, 3)) for each in hidden]).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack([each.var((0, 2, 3)) for each in hidden]).mean(0))
    assert not norm.training
    assert alike(model.state_dict(), before)
