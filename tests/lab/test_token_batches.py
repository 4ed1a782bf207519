from pathlib import Path

import pytest
import torch
from tiny_data import german_sentences

from adahessian.lab.data.token_batches import END, PADDING, START, Sentences, TokenBatches
from adahessian.lab.tasks.task import Env

SOURCE = [[3 + len(word) for word in row] for row in german_sentences(120, 0)]
TARGET = [[10 + token for token in row[::-1]] for row in SOURCE]
MOST = 64


def batches_of(source, target, most=MOST, ranks=1):
    env = Env(data_dir=Path(), device=torch.device("cpu"), seed=0, world_size=ranks)
    return TokenBatches(Sentences(source), Sentences(target), most, env)


def test_an_epoch_has_every_pair_once_in_batches_of_few_shapes():
    batches = list(batches_of(SOURCE, TARGET).epoch(1))
    rows = [
        tuple([token for token in row.tolist() if token not in (PADDING, END)] for row in pair)
        for sources, _, targets in batches
        for pair in zip(sources, targets, strict=True)
    ]
    assert sorted(rows) == sorted(zip(SOURCE, TARGET, strict=True))
    assert all(part.shape == batch[0].shape for batch in batches for part in batch)
    assert all(batch[0].shape[1] % 8 == 0 and batch[0].numel() <= MOST for batch in batches)
    # All batches are full, except for the one with the shortest pairs.
    assert sum(batch[0].shape[0] != MOST // batch[0].shape[1] for batch in batches) <= 1


def test_the_decoder_reads_the_target_one_place_later():
    for source, read, target in batches_of(SOURCE, TARGET).epoch(0):
        assert (read[:, 0] == START).all()
        assert torch.equal(read[:, 1:], target[:, :-1].masked_fill(target[:, :-1] == END, PADDING))
        for rows in (source, target):
            last = (rows != PADDING).sum(1, keepdim=True) - 1
            assert torch.equal((rows == END).nonzero(), torch.cat((torch.arange(len(rows))[:, None], last), 1))


def test_a_batch_with_fewer_pairs_than_ranks_is_left_out():
    rows = [[5] * length for length in (30, 30, 3)]
    assert [len(batches_of(rows, rows, ranks=ranks)) for ranks in (1, 2)] == [2, 1]


def test_a_slice_is_a_fair_sample_of_its_batch():
    rows = [[5] * length for length in range(17, 24) for _ in range(20)]
    (batch,) = batches_of(rows, rows, 24 * 140).epoch(0)
    first, second = ((part != PADDING).sum(1).double().mean() for part in batch[0].chunk(2))
    assert first == pytest.approx(second, abs=1)
