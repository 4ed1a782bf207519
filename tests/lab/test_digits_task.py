import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_image_tasks import assert_products_agree
from torchmetrics.functional.classification import multiclass_accuracy

from adahessian.lab import digits
from adahessian.lab.settings import OPTIMIZER_NAMES
from adahessian.lab.tasks.digits import EXPERIMENTS
from adahessian.lab.tasks.task import Place, Share

(DIGITS,) = EXPERIMENTS


def load(share=Share(), seed=3):  # noqa: B008
    place = Place(data_dir=Path(), device=torch.device("cpu"), seed=seed, share=share)
    return DIGITS.load(DIGITS.defaults["adahessian"], place)


def same(batches, others):
    return len(batches) == len(others) and all(
        torch.equal(images, other_images) and torch.equal(labels, other_labels)
        for (images, labels), (other_images, other_labels) in zip(batches, others, strict=True)
    )


def test_settings_are_those_of_the_demo():
    assert set(DIGITS.defaults) == set(OPTIMIZER_NAMES)
    for settings in DIGITS.defaults.values():
        assert (settings.epochs, settings.batch_size) == (digits.EPOCHS, digits.BATCH_SIZE)
        assert settings.schedule == "cosine"
    assert DIGITS.defaults["adahessian"].lr == 0.3
    assert DIGITS.defaults["adahessian"].weight_decay == pytest.approx(5e-4 / 0.3)


def test_batches_are_a_function_of_seed_epoch_and_number():
    task = load()
    expected = list(task.batches(1))
    assert len(expected) == task.steps_per_epoch == 20
    assert expected[0][0].shape == (64, 1, 8, 8)
    assert same(list(load().batches(1)), expected)
    assert same(list(task.batches(1, start=7)), expected[7:])
    assert not same(list(task.batches(2)), expected)
    assert not same(list(load(seed=4).batches(1)), expected)


def test_every_digit_at_most_once_an_epoch():
    training, _ = digits.training_and_test_examples()
    assert len(training.images.flatten(1).unique(dim=0)) == len(training)
    seen = torch.cat([images for images, _ in load().batches(0)])
    assert len(seen.flatten(1).unique(dim=0)) == len(seen) == 1280


def test_processes_share_a_batch():
    images, labels = next(load().batches(0))
    parts = [next(load(Share(rank, 2)).batches(0)) for rank in range(2)]
    assert torch.equal(torch.cat([part for part, _ in parts]), images)
    assert torch.equal(torch.cat([part for _, part in parts]), labels)


def test_it_learns_and_its_metrics_are_those_of_torchmetrics():
    task = load()
    torch.manual_seed(0)
    model = task.make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batch in itertools.chain.from_iterable(map(task.batches, range(3))):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    _, test = digits.training_and_test_examples()
    with torch.no_grad():
        found = task.evaluate(model.eval())
        logits = model(test.images)
    accuracy = multiclass_accuracy(logits, test.labels, num_classes=10, average="micro").item()
    assert found["test_accuracy"] == pytest.approx(100 * accuracy)
    assert found["test_loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, test.labels).item())
    assert found["test_accuracy"] > 50
    assert not model.training


def test_products_by_both_ways_agree():
    task = load()
    torch.manual_seed(0)
    assert_products_agree(task, task.make_model())


def test_the_tasks_are_known_without_packages_of_others():
    """Machines without scikit-learn and Pillow still have the other tasks."""
    program = (
        "import sys\n"
        "sys.modules['sklearn'] = sys.modules['PIL'] = None\n"
        "import adahessian.lab.tasks.digits, adahessian.lab.tasks.images\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
