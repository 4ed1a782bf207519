"""Which batches are of one kind, and which kinds are worth compiling for."""

from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch

from adahessian.curvature.batches import signature
from adahessian.curvature.kinds import Kinds

X = torch.zeros(8, 3)
Pair = namedtuple("Pair", ["x", "y"])


def of_size(size):
    return torch.zeros(size, 3)


# What is of one kind -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (X, torch.ones(8, 3)),
        ((X, X), (torch.ones(8, 3), torch.ones(8, 3))),
        ({"x": X, "more": [X, ("mean", 2)]}, {"x": torch.ones(8, 3), "more": [torch.ones(8, 3), ("mean", 2)]}),
        (UserDict(x=X), {"x": torch.ones(8, 3)}),
        (None, None),
    ],
)
def test_values_of_tensors_do_not_matter(one, other):
    assert signature(one) == signature(other)
    assert hash(signature(one)) == hash(signature(other))


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(7, 3),
        torch.zeros(3, 8).t(),
        torch.zeros(8, 3, dtype=torch.float64),
        torch.zeros(8, 3, device="meta"),
        torch.zeros(8, 3, requires_grad=True),
        (X,),
        [X],
        {"x": X},
    ],
)
def test_all_else_about_a_tensor_does(other):
    assert signature(other) != signature(X)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((X, X), [X, X]),
        ((X, X), Pair(X, X)),
        ((X, "mean"), (X, "sum")),
        ((X, (X, 1)), (X, (X, 2))),
        ({"x": X}, {"y": X}),
        ({"x": {"y": X}}, {"x": {"y": of_size(7)}}),
    ],
)
def test_structure_matters_and_so_does_what_is_no_tensor(one, other):
    assert signature(one) != signature(other)


@pytest.mark.parametrize("thing", [np.zeros(3), {1, 2}, bytearray(b"x")], ids=str)
def test_what_is_no_plain_value_has_no_signature(thing):
    with pytest.raises(TypeError, match=f"a {type(thing).__name__}"):
        signature({"x": (X, [thing])})


# What is worth it ----------------------------------------------------------------------------------------------------


# How often a kind must come until it is worth a capture alone, and until it is worth compiling.
OFTEN = pytest.mark.parametrize(("compiles", "often"), [(False, 10), (True, 300)])


@OFTEN
def test_the_first_kind_is_worth_it_at_once_and_others_when_they_have_come_often(compiles, often, said):
    kinds = Kinds()
    first = kinds.key((of_size(8), "mean"), compiles=compiles)
    assert first is not None
    assert not said.messages
    for _ in range(often - 1):
        assert kinds.key((of_size(5), "mean"), compiles=compiles) is None
        assert kinds.key((of_size(8), "mean"), compiles=compiles) == first
    assert said.messages == [
        "a batch of another shape is not compiled for, nor captured, unless that shape comes often; pad or drop "
        "incomplete batches to have all of them alike"
    ]
    second = kinds.key((of_size(5), "mean"), compiles=compiles)
    assert second is not None
    assert second != first
    assert kinds.key((of_size(5), "mean"), compiles=compiles) == second


@pytest.mark.parametrize(("batches", "from_epoch"), [(100, None), (20, 10)])
def test_the_last_batch_of_a_long_epoch_is_never_worth_it_and_that_of_a_short_one_soon_is(batches, from_epoch):
    kinds = Kinds()
    worth_it = []
    for _ in range(200):
        for _ in range(batches - 1):
            kinds.key(of_size(8), compiles=False)
        worth_it.append(kinds.key(of_size(5), compiles=False) is not None)
    assert (worth_it.index(True) + 1 if True in worth_it else None) == from_epoch


@OFTEN
def test_after_a_change_of_all_batches_the_new_kind_does_not_wait_for_its_share_of_the_past(compiles, often):
    kinds = Kinds()
    for _ in range(100_000):
        kinds.key(of_size(8), compiles=compiles)
    assert [kinds.key(of_size(5), compiles=compiles) is not None for _ in range(often)].index(True) == often - 1


def test_batches_that_pass_by_count():
    kinds = Kinds()
    kinds.key(of_size(8))
    for _ in range(400):
        for _ in range(99):
            kinds.pass_by()
        assert kinds.key(of_size(5)) is None


@OFTEN
def test_no_more_than_eight_kinds_are_worth_it(compiles, often):
    kinds = Kinds()
    for size in range(1, 12):
        for _ in range(often):
            kinds.key(of_size(size), compiles=compiles)
    worth_it = [kinds.key(of_size(size), compiles=compiles) is not None for size in range(1, 12)]
    assert worth_it == [True] * 8 + [False] * 3


def test_what_has_no_signature_is_never_worth_it_and_that_is_said(said):
    kinds = Kinds()
    for _ in range(20):
        assert kinds.key((of_size(8), np.zeros(3))) is None
    assert said.messages == ["batches are not compiled for, as they hold what cannot be compared: a ndarray"]
    assert kinds.key(of_size(8)) is not None, "the first of those that can"


def test_a_kind_that_was_refused_is_not_worth_it_again():
    kinds = Kinds()
    kinds.key(of_size(8))
    kind = kinds.key(of_size(5), at_once=True)
    assert kind is not None
    kinds.refuse(kind)
    assert all(kinds.key(of_size(5)) is None for _ in range(20))
    assert kinds.key(of_size(8)) is not None


def test_where_every_batch_is_of_another_kind_they_are_not_counted_for_ever():
    kinds = Kinds()
    for size in range(1500):
        kinds.key((of_size(8), size))
    assert len(kinds._seen) == 1000
    assert kinds.key((of_size(8), 0)) is not None, "the first goes on"


def test_what_is_to_be_captured_is_worth_it_at_once():
    kinds = Kinds()
    assert kinds.key(of_size(8)) is not None
    assert kinds.key(of_size(7)) is None
    assert kinds.key(of_size(6), at_once=True) is not None
    assert kinds.key(of_size(6)) is not None
