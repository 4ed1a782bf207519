import pytest
import torch

from adahessian.lab.contenders import CONTENDERS
from adahessian.lab.digits import train, training_and_test_examples

ADAHESSIAN = next(contender for contender in CONTENDERS if contender.name == "AdaHessian")


def without_times(epochs):
    return [(epoch.train_loss, epoch.accuracy, epoch.steps) for epoch in epochs]


def run(contender, seed):
    training, test = training_and_test_examples()
    few = training.take(torch.arange(192))
    return without_times(train(contender, seed=seed, training=few, held_out=test, epochs=2))


def test_the_split_is_fixed_disjoint_and_whole():
    training, test = training_and_test_examples()
    assert (len(training), len(test)) == (1297, 500)
    assert torch.equal(test.labels, training_and_test_examples()[1].labels)
    # Every digit has its share: a tenth of the test examples, give or take a few.
    assert all(45 <= count <= 55 for count in test.labels.bincount().tolist())


def test_every_contender_was_searched_as_widely_and_took_an_inner_value():
    for contender in CONTENDERS:
        assert len(contender.searched_lrs) == len(CONTENDERS[0].searched_lrs)
        assert contender.lr in contender.searched_lrs[1:-1]


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_a_seed_decides_a_run(contender):
    torch.manual_seed(1)
    first = run(contender, seed=0)
    torch.manual_seed(2)
    assert run(contender, seed=0) == first
    assert run(contender, seed=1) != first


def test_a_run_leaves_the_random_stream_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    run(ADAHESSIAN, seed=5)
    assert torch.equal(torch.rand(3), expected)
