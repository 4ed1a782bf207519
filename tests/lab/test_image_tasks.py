from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.func import functional_call, grad, jvp
from torch.nn.functional import cross_entropy, pad
from torchmetrics.functional.classification import multiclass_accuracy

from adahessian.lab.augmentation import PaddedCrops
from adahessian.lab.data.errors import DataError
from adahessian.lab.models.resnet import ResNet
from adahessian.lab.models.resnet18 import ResNet18
from adahessian.lab.settings import OPTIMIZER_NAMES
from adahessian.lab.tasks.images import EXPERIMENTS, Normalisation
from adahessian.lab.tasks.task import Place, Share

BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}
CPU = torch.device("cpu")
TRAINING_ROWS, TEST_ROWS = 50, 12


@pytest.fixture(scope="module")
def cifar10_dir(tmp_path_factory):
    """A CIFAR-10 of ten images a batch and twelve to test, in the binary format. Each image has a red of its own."""
    folder = tmp_path_factory.mktemp("data") / "cifar-10-batches-bin"
    folder.mkdir()
    rng = np.random.default_rng(0)
    reds = iter(range(1, 1 + TRAINING_ROWS + TEST_ROWS))
    for name, rows in [*((f"data_batch_{i}", 10) for i in range(1, 6)), ("test_batch", TEST_ROWS)]:
        labels = rng.integers(10, size=(rows, 1), dtype=np.uint8)
        pixels = rng.integers(256, size=(rows, 3072), dtype=np.uint8)
        pixels[:, :1024] = np.array([next(reds) for _ in range(rows)])[:, None]
        (folder / f"{name}.bin").write_bytes(np.concatenate((labels, pixels), 1).tobytes())
    return folder


@pytest.fixture(scope="module")
def folder_dir(tmp_path_factory):
    """Three classes of three images to train on and one to validate with."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for part, count in (("train", 3), ("val", 1)):
        for name in ("a", "b", "c"):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(256, size=(40, 36, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{i}.png")
    return folder


def load(name, data_dir, share=Share(), seed=3, **changes):  # noqa: B008
    experiment = BY_NAME[name]
    settings = replace(experiment.defaults["adahessian"], **changes)
    return experiment.load(settings, Place(data_dir=data_dir, device=CPU, seed=seed, share=share))


def same(batches, others):
    return len(batches) == len(others) and all(
        torch.equal(images, other_images) and torch.equal(labels, other_labels)
        for (images, labels), (other_images, other_labels) in zip(batches, others, strict=True)
    )


def marks(images):
    """What tells the images of ``cifar10_dir`` apart: the red in the middle, which is in every crop."""
    return images[:, 0, 16, 16]


class TestCrops:
    def test_every_view_is_a_crop_of_the_padded_image(self):
        images = torch.arange(1.0, 1 + 2 * 5 * 5 * 3).view(2, 5, 5, 3)
        crops = PaddedCrops(5, padding=2)
        seen = set()
        for view in range(50):
            views = torch.tensor([view, view])
            cropped = crops.crop(images, views) * crops.inside(views)
            padded = pad(images.permute(0, 3, 1, 2), (2, 2, 2, 2)).permute(0, 2, 3, 1)
            expected = {
                (flip, y, x): window.flip(2) if flip else window
                for y in range(5)
                for x in range(5)
                for window in [padded[:, y : y + 5, x : x + 5]]
                for flip in (False, True)
            }
            seen |= {key for key, window in expected.items() if torch.equal(window, cropped)}
        assert len(seen) == 50

    def test_every_view_is_as_likely(self):
        counts = PaddedCrops(8).draw(162 * 400, torch.Generator().manual_seed(0)).bincount(minlength=162)
        # Chi squared with 161 degrees of freedom: mean 161, standard deviation 18.
        assert 100 < ((counts - 400) ** 2 / 400).sum() < 240


class TestNormalisation:
    def test_images_have_mean_0_and_deviation_1(self):
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(10, 200, (40, 6, 6, 3), generator=generator, dtype=torch.uint8)
        images[..., 1] //= 3
        normalised = Normalisation.of(images)(images)
        assert normalised.dtype == torch.float32
        torch.testing.assert_close(normalised.mean((0, 1, 2)), torch.zeros(3), atol=1e-5, rtol=0)
        torch.testing.assert_close(normalised.std((0, 1, 2), correction=0), torch.ones(3))
        scaled = images.double() / 255
        expected = (scaled - scaled.mean((0, 1, 2))) / scaled.std((0, 1, 2), correction=0)
        torch.testing.assert_close(normalised.double(), expected, atol=1e-6, rtol=1e-5)

    def test_a_channel_that_never_changes_is_0(self):
        images = torch.full((2, 4, 4, 3), 7, dtype=torch.uint8)
        torch.testing.assert_close(Normalisation.of(images)(images), torch.zeros(2, 4, 4, 3), atol=1e-7, rtol=0)


class TestBatches:
    def test_seed_epoch_and_number_decide(self, cifar10_dir):
        task = load("cifar10-resnet20", cifar10_dir, batch_size=16)
        expected = list(task.batches(2))
        assert len(expected) == task.steps_per_epoch == 4
        assert [len(labels) for _, labels in expected] == [16, 16, 16, 2]
        assert [images.shape for images, _ in expected[:1]] == [(16, 3, 32, 32)]
        assert same(list(task.batches(2)), expected)
        assert same(list(load("cifar10-resnet20", cifar10_dir, batch_size=16).batches(2)), expected)
        assert not same(list(task.batches(3)), expected)
        assert not same(list(load("cifar10-resnet20", cifar10_dir, seed=4, batch_size=16).batches(2)), expected)

    def test_order_and_crops_both_change_with_seed_and_epoch(self, cifar10_dir):
        def order_and_crops(seed, epoch):
            images, _ = next(load("cifar10-resnet20", cifar10_dir, seed=seed).batches(epoch))
            return marks(images), (images == 0).all(1)

        order, crops = order_and_crops(3, 2)
        for seed, epoch in ((3, 1), (4, 2)):
            other_order, other_crops = order_and_crops(seed, epoch)
            assert not torch.equal(other_order, order)
            assert not torch.equal(other_crops, crops)

    @pytest.mark.parametrize("start", [1, 3, 4])
    def test_a_start_in_the_middle(self, cifar10_dir, start):
        task = load("cifar10-resnet20", cifar10_dir, batch_size=16)
        assert same(list(task.batches(1, start)), list(task.batches(1))[start:])

    def test_draw_nothing_from_torchs_stream(self, cifar10_dir):
        task = load("cifar10-resnet20", cifar10_dir, batch_size=16)
        before = torch.get_rng_state()
        list(task.batches(0))
        assert torch.equal(torch.get_rng_state(), before)

    def test_every_image_once_an_epoch_whoever_takes_it(self, cifar10_dir):
        whole = list(load("cifar10-resnet20", cifar10_dir, batch_size=16).batches(0))
        assert len(torch.cat([marks(images) for images, _ in whole]).unique()) == TRAINING_ROWS
        shares = [
            list(load("cifar10-resnet20", cifar10_dir, batch_size=16, share=Share(rank, 2)).batches(0))
            for rank in range(2)
        ]
        for (images, labels), *parts in zip(whole, *shares, strict=True):
            assert torch.equal(torch.cat([marks(part) for part, _ in parts]), marks(images))
            assert torch.equal(torch.cat([part_labels for _, part_labels in parts]), labels)

    def test_every_process_crops_by_itself(self, cifar10_dir):
        crops = []
        for rank in range(2):
            task = load("cifar10-resnet20", cifar10_dir, batch_size=32, share=Share(rank, 2))
            images, _ = next(task.batches(0))
            crops.append((images == 0).all(1))
        assert not torch.equal(*crops)

    def test_labels_go_with_their_images(self, cifar10_dir):
        rows = [
            np.frombuffer((cifar10_dir / f"data_batch_{i}.bin").read_bytes(), np.uint8).reshape(-1, 3073)
            for i in range(1, 6)
        ]
        expected = [label for label, *_ in np.concatenate(rows).tolist()]
        batches = list(load("cifar10-resnet20", cifar10_dir, batch_size=16).batches(0))
        # Reds rise from image to image, and normalisation keeps that.
        by_red = torch.cat([marks(images) for images, _ in batches]).argsort()
        assert torch.cat([labels for _, labels in batches])[by_red].tolist() == expected

    def test_a_last_batch_too_small_for_all_is_left_out(self, cifar10_dir):
        assert load("cifar10-resnet20", cifar10_dir, batch_size=16, share=Share(0, 2)).steps_per_epoch == 4
        task = load("cifar10-resnet20", cifar10_dir, batch_size=16, share=Share(0, 3))
        assert task.steps_per_epoch == 3
        assert [len(labels) for _, labels in task.batches(0)] == [5, 5, 5]

    def test_padding_is_0_and_the_rest_is_the_image(self, cifar10_dir):
        task = load("cifar10-resnet20", cifar10_dir, batch_size=50)
        ((images, _),) = task.batches(0)
        outside = images == 0
        # No pixel of an image is 0: padding is whole rows and columns, the same in all channels.
        assert outside.any()
        rows, columns = outside.all(3, keepdim=True), outside.all(2, keepdim=True)
        assert torch.equal(outside, (rows | columns).expand_as(outside))
        assert outside.float().mean() < 0.25


class TestFolders:
    def test_held_and_streamed_images_are_the_same(self, folder_dir):
        changes = {"batch_size": 4, "image_size": 32}
        held = load("image-folder-resnet18", folder_dir, workers=0, **changes)
        expected = list(held.batches(1))
        assert [labels.shape for _, labels in expected] == [(4,), (4,), (1,)]
        for workers in (0, 2):
            streamed = load("image-folder-resnet18", folder_dir, workers=workers, cache_gib=0.0, **changes)
            assert type(streamed._training) is not type(held._training)
            assert same(list(streamed.batches(1)), expected)
            assert same(list(streamed.batches(1, start=2)), expected[2:])
            model = held.make_model().eval()
            with torch.no_grad():
                assert streamed.evaluate(model) == held.evaluate(model)

    def test_imagenet_is_a_function_of_seed_and_epoch(self, folder_dir):
        changes = {"batch_size": 4, "image_size": 56}
        task = load("imagenet-resnet18", folder_dir, workers=0, **changes)
        expected = list(task.batches(1))
        assert expected[0][0].shape == (4, 3, 56, 56)
        assert same(list(load("imagenet-resnet18", folder_dir, workers=1, **changes).batches(1, start=1)), expected[1:])
        assert not same(list(task.batches(2)), expected)
        shares = [
            list(load("imagenet-resnet18", folder_dir, workers=0, share=Share(rank, 2), **changes).batches(1))
            for rank in range(2)
        ]
        # What is left over of an image for two is left out, and the other views are the same.
        together = [tuple(torch.cat(both) for both in zip(*parts, strict=True)) for parts in zip(*shares, strict=True)]
        assert same(together, expected[:2])

    def test_bad_data_is_said_before_training(self, tmp_path):
        for name, message in (("imagenet-resnet18", "No folder"), ("cifar10-resnet20", "No CIFAR-10")):
            with pytest.raises(DataError, match=message):
                load(name, tmp_path)


def test_metrics_are_those_of_torchmetrics(cifar10_dir):
    task = load("cifar10-resnet20", cifar10_dir)
    task._evaluated_at_a_time = 5
    model = task.make_model()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            # Else all images would look much alike to it.
            module.momentum = None
    with torch.no_grad():
        model(next(task.batches(0))[0])
        found = task.evaluate(model.eval())
        images = task._for_network(task._normalisation(task._test.images))
        logits, labels = model(images), task._test.labels
    accuracy = multiclass_accuracy(logits, labels, num_classes=10, average="micro")
    assert found["test_accuracy"] == pytest.approx(100 * accuracy.item())
    assert found["test_loss"] == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-5)
    with torch.no_grad():
        # All right, and all wrong.
        task._test.labels = logits.argmax(1)
        assert task.evaluate(model)["test_accuracy"] == 100
        task._test.labels = (logits.argmax(1) + 1) % 10
        assert task.evaluate(model)["test_accuracy"] == 0


class TestRecomputedStatistics:
    """The accuracy with batch norm's statistics computed anew."""

    @pytest.fixture
    def task(self, cifar10_dir):
        return load("cifar10-resnet20", cifar10_dir, batch_size=10)

    @pytest.fixture
    def model(self, task):
        torch.manual_seed(0)
        model = task.make_model().eval()
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.uniform_(-2, 2)
        return model

    @staticmethod
    def first_norm(task, batches):
        """Mean and variance of what the first batch norm gets, over so many batches."""
        torch.manual_seed(0)
        model = task.make_model()
        hidden = [model.conv(images).detach() for images, _ in list(task.batches(0))[:batches]]
        means, variances = zip(*((each.mean((0, 2, 3)), each.var((0, 2, 3))) for each in hidden), strict=True)
        return torch.stack(means).mean(0), torch.stack(variances).mean(0)

    @pytest.mark.parametrize(("views", "batches"), [(10, 1), (11, 2), (1000, 5)])
    def test_they_are_the_mean_over_batches_as_they_are_trained_on(self, task, model, monkeypatch, views, batches):
        monkeypatch.setattr("adahessian.lab.tasks.images._STATISTICS_OF", views)
        with torch.no_grad():
            recomputed = task._with_recomputed_statistics(model)
        assert not any(module.training for module in recomputed.modules())
        norm = recomputed.norm
        mean, variance = self.first_norm(task, batches)
        torch.testing.assert_close(norm.running_mean, mean)
        torch.testing.assert_close(norm.running_var, variance)

    def test_the_accuracy_is_that_of_these_statistics(self, task, model):
        inputs = task._for_network(task._normalisation(task._test.images))
        with torch.no_grad():
            task._test.labels = task._with_recomputed_statistics(model)(inputs).argmax(1)
            found = task.evaluate(model)
            assert found["test_accuracy_recomputed"] == 100
            expected = cross_entropy(model(inputs), task._test.labels).item()
            assert found["test_loss"] == pytest.approx(expected, rel=1e-5)
            assert found["test_accuracy"] == 100 * (model(inputs).argmax(1) == task._test.labels).float().mean() < 100

    def test_the_model_and_the_random_streams_are_left_as_they_were(self, task, model):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        random = torch.get_rng_state()
        with torch.no_grad():
            first, again = task.evaluate(model), task.evaluate(model)
        assert first == again
        assert torch.equal(torch.get_rng_state(), random)
        assert not any(module.training for module in model.modules())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    @pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
    def test_all_show_them_and_say_what_they_are(self, experiment):
        assert [metric.name for metric in experiment.beside] == ["test_accuracy_recomputed"]
        assert any("recomputed from about 5,000 training images" in note for note in experiment.notes)


class TestResNet18:
    def test_parameters(self):
        assert sum(param.numel() for param in ResNet18().parameters()) == 11_689_512

    def test_shapes(self):
        model = ResNet18(7, width=4)
        assert model(torch.randn(2, 3, 64, 64)).shape == (2, 7)
        assert model.pool(model.conv(torch.randn(2, 3, 224, 224))).shape == (2, 4, 56, 56)
        small = ResNet18(7, small_images=True, width=4)
        assert small.pool(small.conv(torch.randn(2, 3, 64, 64))).shape == (2, 4, 64, 64)
        assert small(torch.randn(2, 3, 64, 64)).shape == (2, 7)

    def test_shortcuts_are_projections_where_the_shape_changes(self):
        model = ResNet18(7, width=4)
        assert [len(block.shortcut) for block in model.blocks] == [0, 0, 2, 0, 2, 0, 2, 0]

    def test_first_weights_keep_the_scale_going_backwards(self):
        torch.manual_seed(0)
        weight = ResNet18().blocks[-1].conv2.weight
        assert weight.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)


@pytest.mark.parametrize("small", [True, False])
def test_products_by_both_ways_agree_for_resnet18(folder_dir, small):
    task = load("image-folder-resnet18", folder_dir, workers=0, batch_size=4, image_size=32)
    torch.manual_seed(0)
    assert_products_agree(task, ResNet18(3, small_images=small, width=4))


def test_the_first_logits_of_resnet20_are_close_together():
    """Else some classes are all but certain, and have next to no curvature for the first step to divide by."""
    torch.manual_seed(0)
    logits = ResNet(20)(torch.randn(64, 3, 32, 32))
    assert logits.std(1).max() < 1.5


def test_products_by_both_ways_agree_for_resnet20(cifar10_dir):
    task = load("cifar10-resnet20", cifar10_dir, batch_size=4)
    torch.manual_seed(0)
    assert_products_agree(task, ResNet(8, width=4))


def assert_products_agree(task, model):
    model = model.double().train()
    images, labels = next(task.batches(0))
    batch = images.double(), labels
    params = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
    probe = {name: torch.randn_like(param) for name, param in params.items()}
    buffers = dict(model.named_buffers())

    def loss(params):
        state = {**params, **{name: buffer.clone() for name, buffer in buffers.items()}}
        return task.loss(lambda inputs: functional_call(model, state, (inputs,)), batch)

    gradients = torch.autograd.grad(loss(params), list(params.values()), create_graph=True)
    expected = torch.autograd.grad(gradients, list(params.values()), list(probe.values()))
    _, found = jvp(grad(loss), ({name: param.detach() for name, param in params.items()},), (probe,))
    scale = torch.cat([value.flatten() for value in expected]).norm()
    assert scale > 0.1
    for value, name in zip(expected, params, strict=True):
        assert (found[name] - value).norm() <= 1e-8 * scale


def test_the_loss_is_the_mean_over_any_slice(cifar10_dir):
    task = load("cifar10-resnet20", cifar10_dir, batch_size=8)
    model = task.make_model().eval()
    images, labels = next(task.batches(0))
    halves = [task.loss(model, (images[part], labels[part])) for part in (slice(0, 4), slice(4, 8))]
    torch.testing.assert_close(torch.stack(halves).mean(), task.loss(model, (images, labels)))


class TestExperiments:
    @pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
    def test_every_optimizer_has_its_settings(self, experiment):
        assert set(experiment.defaults) == set(OPTIMIZER_NAMES)
        assert experiment.defaults["adahessian"].eps == 1e-4
        assert {settings.batch_size for settings in experiment.defaults.values()} == {256}

    def test_cifar10_is_set_as_in_the_paper(self):
        for name in ("cifar10-resnet20", "cifar10-resnet32"):
            defaults = BY_NAME[name].defaults
            for settings in defaults.values():
                assert (settings.epochs, settings.schedule) == (160, "steps")
                assert (settings.decay_epochs, settings.decay_factor) == ((80, 120), 0.1)
            assert [defaults[o].lr for o in ("adahessian", "sgd", "adam", "adamw")] == [0.15, 0.1, 0.001, 0.01]
            assert [defaults[o].weight_decay for o in ("sgd", "adam")] == [5e-4, 5e-4]
            for optimizer in ("adahessian", "adamw"):
                assert defaults[optimizer].weight_decay * defaults[optimizer].lr == pytest.approx(5e-4)

    def test_folders_wait_for_a_plateau(self):
        for name, epochs, size in (("imagenet-resnet18", 90, 224), ("image-folder-resnet18", 40, 64)):
            for settings in BY_NAME[name].defaults.values():
                assert (settings.epochs, settings.image_size) == (epochs, size)
                assert (settings.schedule, settings.decay_factor, settings.plateau_patience) == ("plateau", 0.5, 3)

    def test_depths(self, cifar10_dir):
        for depth, blocks in ((20, 9), (32, 15)):
            assert len(load(f"cifar10-resnet{depth}", cifar10_dir).make_model().blocks) == blocks
