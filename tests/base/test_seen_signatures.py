"""Which batches have the same signature, and which signatures are worth compiling for."""

from collections import UserDict, namedtuple
from dataclasses import make_dataclass

import numpy as np
import pytest
import torch

from adahessian.base.batches import SeenSignatures, signature

X = torch.zeros(8, 3)
Pair = namedtuple("Pair", ["x", "y"])
Data, Other = (make_dataclass(name, ["x", "y"]) for name in ("Data", "Other"))


def of_size(size):
    return torch.zeros(size, 3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (X, torch.ones(8, 3)),
        ((X, X), (torch.ones(8, 3), torch.ones(8, 3))),
        ({"x": X, "more": [X, ("mean", 2)]}, {"x": torch.ones(8, 3), "more": [torch.ones(8, 3), ("mean", 2)]}),
        (UserDict(x=X), {"x": torch.ones(8, 3)}),
        (Data(X, "mean"), Data(torch.ones(8, 3), "mean")),
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
def test_everything_else_about_a_tensor_matters(other):
    assert signature(other) != signature(X)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((X, X), [X, X]),
        ((X, X), Pair(X, X)),
        ((X, "mean"), (X, "sum")),
        ((X, (X, 1)), (X, (X, 2))),
        ((X, 1), (X, True)),
        ({"x": X}, {"y": X}),
        ({"x": {"y": X}}, {"x": {"y": of_size(7)}}),
        (Data(X, X), Other(X, X)),
        (Data(X, X), Data(X, of_size(7))),
    ],
)
def test_structure_and_plain_values_matter(one, other):
    assert signature(one) != signature(other)


@pytest.mark.parametrize(
    "thing", [np.zeros(3), {1, 2}, bytearray(b"x"), X.to_sparse(), Data], ids=lambda x: str(type(x))
)
def test_other_objects_have_no_signature(thing):
    with pytest.raises(TypeError, match=type(thing).__name__):
        signature({"x": (X, [thing])})


def test_the_first_signature_is_worth_it_at_once_and_another_after_50_times(said):
    seen = SeenSignatures()
    first = seen.key((of_size(8), "mean"))
    assert first is not None
    assert not said.messages
    for _ in range(49):
        assert seen.key((of_size(5), "mean")) is None
        assert seen.key((of_size(8), "mean")) == first
    assert len(said.messages) == 1
    second = seen.key((of_size(5), "mean"))
    assert second not in (None, first)
    assert seen.key((of_size(5), "mean")) == second


def test_at_most_four_signatures_are_worth_it():
    seen = SeenSignatures()
    for size in range(1, 9):
        for _ in range(60):
            seen.key(of_size(size))
    assert [seen.key(of_size(size)) is not None for size in range(1, 9)] == [True] * 4 + [False] * 4


def test_batches_that_cannot_be_compared_are_never_worth_it(said):
    seen = SeenSignatures()
    assert all(seen.key((of_size(8), np.zeros(3))) is None for _ in range(60))
    assert ["ndarray" in message for message in said.messages] == [True]
    assert seen.key(of_size(8)) is not None, "the first that can be compared"


def test_a_refused_signature_is_not_worth_it_again():
    seen = SeenSignatures()
    first = seen.key(of_size(8))
    seen.refuse(first)
    assert all(seen.key(of_size(8)) is None for _ in range(60))
    assert [seen.key(of_size(5)) is None for _ in range(50)] == [True] * 49 + [False], "not the first any more"


def test_signatures_are_not_counted_without_limit():
    seen = SeenSignatures()
    for size in range(2500):
        seen.key((of_size(8), size))
    assert len(seen._seen) <= 1001
    assert seen.key((of_size(8), 0)) is not None, "the first stays"
