"""The first examples of batches of any structure."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from adahessian.base.batches import choose_part, map_tensors, slice_batch, tensors_in

Pair = namedtuple("Pair", ["x", "rest"])


@dataclass
class Batch:
    x: Tensor
    rest: Any
    length: int = field(init=False)

    def __post_init__(self):
        self.length = len(self.x)


@dataclass(frozen=True, slots=True)
class Target:
    boxes: Tensor
    name: str = "a"


def images(count, *, channels=3, size=4):
    return [torch.full((channels, size, size), float(i)) for i in range(count)]


def targets(count):
    return [{"boxes": torch.zeros(i, 4), "labels": torch.zeros(i)} for i in range(count)]


# Tensors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "fraction", "length"), [(10, 0.25, 3), (10, 0.001, 1), (10, 1e-12, 1), (100, 0.55, 55), (100, 0.07, 7)]
)
def test_fractions_are_rounded_up(size, fraction, length):
    assert torch.equal(slice_batch(torch.arange(size), fraction), torch.arange(length))


def test_the_whole_batch_is_passed_on():
    x = (torch.zeros(3), torch.zeros(4))
    assert slice_batch(x, 1.0) is x


def test_other_dimensions_are_sliced_where_they_exist():
    x, mask = slice_batch((torch.zeros(3, 10), torch.zeros(7)), 0.5, dim=1)
    assert (x.shape, mask.shape) == ((3, 5), (7,))


def test_collections_keep_their_types_and_what_is_not_a_tensor():
    x, scalar = torch.arange(10.0).view(10, 1), torch.tensor(3.0)
    sliced = slice_batch([x, "name", 7, None, ("a", "b")], 0.5)
    assert torch.equal(sliced[0], x[:5])
    assert sliced[1:] == ["name", 7, None, ("a", "b")]
    named = slice_batch(Pair(x, {"y": (x, scalar)}), 0.5)
    assert isinstance(named, Pair)
    assert named.rest["y"][0].shape == (5, 1)
    assert named.rest["y"][1] is scalar


@pytest.mark.parametrize("kind", [UserDict, OrderedDict, dict])
def test_mappings_are_copied_in_their_own_type(kind):
    whole = kind(x=torch.zeros(10, 1), n=3)
    sliced = slice_batch(whole, 0.5)
    assert type(sliced) is kind
    assert (sliced["x"].shape, whole["x"].shape, sliced["n"]) == ((5, 1), (10, 1), 3)
    assert slice_batch(MappingProxyType({"x": whole["x"]}), 0.5)["x"].shape == (5, 1)


def test_dataclasses_are_copied_as_they_are():
    batch = Batch(torch.zeros(8, 2), [Target(torch.zeros(8)), torch.zeros(8)])
    sliced = slice_batch(batch, 0.25)
    assert (sliced.x.shape, sliced.rest[0].boxes.shape, sliced.rest[0].name) == ((2, 2), (2,), "a")
    assert (batch.x.shape, batch.rest[0].boxes.shape) == ((8, 2), (8,))
    assert sliced.length == 8, "__post_init__ is not run again"
    assert [tensor.shape[0] for tensor in tensors_in(batch)] == [8, 8, 8]
    assert map_tensors(torch.ones_like, Target(torch.zeros(2))).boxes.eq(1).all()
    assert map_tensors(torch.ones_like, Target) is Target, "a class is not a batch"


@pytest.mark.parametrize(
    "batch",
    ["text", (torch.zeros(8), torch.zeros(6)), torch.tensor(1.0), [], [torch.zeros(8, 2), torch.zeros(6)], {"n": 3},
     (torch.zeros(8), targets(5)), (images(3), ["a"] * 2, torch.zeros(5)), {"a": ["x"] * 3, "b": ["y"]}],
    ids=str,
)  # fmt: skip
def test_batches_that_cannot_be_sliced(batch):
    with pytest.raises(ValueError, match="batch_dim"):
        slice_batch(batch, 0.5)


@pytest.mark.parametrize(
    "part", [None, 0.25, True, "text", (), {}, torch.zeros(0, 3), (torch.zeros(0, 3), None), [(), []]], ids=str
)
def test_a_function_that_chooses_nothing_is_rejected(part):
    with pytest.raises(ValueError, match="batch_fraction"):
        choose_part(lambda batch: part, torch.zeros(8, 3))


@pytest.mark.parametrize("part", [(torch.zeros(1), torch.zeros(0)), ["text"], [3, 5], object()], ids=range(4))
def test_any_other_part_is_passed_on(part):
    assert choose_part(lambda batch: part, None) is part


# Lists of examples ---------------------------------------------------------------------------------------------------


def test_lists_of_texts_and_numbers_are_cut_if_there_is_one_per_example():
    batch = {
        "text": ["a", "b", "c", "d"],
        "y": torch.zeros(4),
        "options": ["mean"],
        "pair": (torch.zeros(4), [5.0] * 4),
    }
    sliced = slice_batch(batch, 0.5)
    assert (sliced["text"], sliced["options"], sliced["pair"][1]) == (["a", "b"], ["mean"], [5.0, 5.0])
    assert batch["text"] == ["a", "b", "c", "d"]
    assert slice_batch(["a", "b", "c"], 0.5) == ["a", "b"]


@pytest.mark.parametrize("count", [2, 3, 4, 16])
@pytest.mark.parametrize("collection", [tuple, list])
def test_detection_batches(count, collection):
    x, y = slice_batch(collection((images(count), targets(count))), 0.5)
    assert len(x) == len(y) == (count + 1) // 2
    assert x[0].shape == (3, 4, 4)
    assert [target["labels"].shape[0] for target in y] == list(range(len(y)))


@pytest.mark.parametrize(
    "entry",
    [{"ids": torch.zeros(8), "label": 3}, Target(torch.zeros(8)), Pair(torch.zeros(8), 3), UserDict(x=torch.zeros(8))],
    ids=lambda entry: type(entry).__name__,
)
def test_examples_are_not_cut_inside(entry):
    for batch in ([entry] * 4, {"data": [entry] * 4}, ([entry] * 4, torch.zeros(4))):
        sliced = slice_batch(batch, 0.5)
        data = sliced if isinstance(sliced, list) else sliced["data"] if isinstance(sliced, dict) else sliced[0]
        assert len(data) == 2
        assert all(part is entry for part in data)
    assert len(slice_batch([entry], 0.01)) == 1


@pytest.mark.parametrize(
    ("tensors", "rest"),
    [
        ([torch.zeros(5, 2), torch.zeros(7, 2)], None),  # their sizes disagree
        (images(4), None),  # more than three
        (images(2), torch.zeros(2)),
        (images(3), torch.zeros(3)),
        (images(2), ["a", "b"]),
        (images(2), [torch.tensor(0), torch.tensor(1)]),
        (images(2), [torch.zeros(4, 5), torch.zeros(9, 5)]),
    ],
)
def test_tensors_that_are_examples(tensors, rest):
    sliced = slice_batch((tensors, rest), 0.5)
    half = (len(tensors) + 1) // 2
    assert len(sliced[0]) == half
    assert all(one is other for one, other in zip(sliced[0], tensors, strict=False))
    assert rest is None or len(sliced[1]) == half


@pytest.mark.parametrize(
    "batch",
    [
        [torch.zeros(8, 3), torch.zeros(8)],
        [torch.zeros(8, 3), torch.zeros(8, 3)],
        [torch.zeros(8), torch.zeros(8, dtype=torch.int64)],
        ([torch.zeros(8), torch.zeros(8)], torch.zeros(8, 2)),
        {"views": [torch.zeros(8, 5), torch.zeros(8, 5)], "scales": [1.0, 0.5], "y": torch.zeros(8)},
        {"views": [torch.zeros(8, 5), torch.zeros(8, 5)], "names": ["a"] * 8},
        [{"x": torch.zeros(8)}, {"y": torch.zeros(8)}],
        [Target(torch.zeros(8)), Pair(torch.zeros(8), None)],
    ],
    ids=str,
)
def test_tensors_of_a_data_loader_are_cut(batch):
    sliced = slice_batch(batch, 0.25)
    assert len(sliced) == len(batch)
    assert {tensor.shape[0] for tensor in tensors_in(sliced)} == {2}


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize(
    ("shape", "label"), [((1, 8, 8), torch.tensor(3)), ((8, 8), 3), ((100,), torch.tensor(3)), ((3, 8), torch.ones(2))]
)
def test_a_list_of_samples_is_cut_by_samples(kind, shape, label):
    batch = [kind([torch.full(shape, float(i)), label]) for i in range(8)]
    sliced = slice_batch(batch, 0.25)
    assert len(sliced) == 2
    assert all(torch.equal(image, torch.full(shape, float(i))) for i, (image, _) in enumerate(sliced))


def test_a_list_of_pairs_of_batches_is_a_structure():
    x, y, texts = torch.zeros(8, 3), torch.zeros(8), list("abcdefgh")
    assert [[len(part) for part in pair] for pair in slice_batch([[x, x], [y, y]], 0.25)] == [[2, 2], [2, 2]]
    assert [len(part) for part in slice_batch([[texts, texts], x], 0.25)[0]] == [2, 2]
