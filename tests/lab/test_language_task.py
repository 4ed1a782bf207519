import math
from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jvp

from adahessian.lab.settings import OPTIMIZER_NAMES
from adahessian.lab.tasks.language import EXPERIMENTS
from adahessian.lab.tasks.task import Place, Share

BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}
SMALL = {"layers": 2, "width": 8, "head_width": 4, "feed_forward": 12, "segment": 6, "batch_size": 4}
LINES = 60
ALONE = Share()


@pytest.fixture
def ptb(tmp_path):
    for part, lines in (("train", LINES), ("valid", 7), ("test", 9)):
        rows = [f" the w{i % 13} of w{(i * i) % 11} <unk> \n" for i in range(lines)]
        (tmp_path / f"ptb.{part}.txt").write_text("".join(rows))
    return tmp_path


def load(data_dir, name="ptb-tensorized", seed=0, share=ALONE, **settings):
    experiment = BY_NAME[name]
    place = Place(data_dir=data_dir, device=torch.device("cpu"), seed=seed, share=share)
    return experiment.load(replace(experiment.defaults["adahessian"], **{**SMALL, **settings}), place)


def make_model(task):
    torch.manual_seed(0)
    return task.make_model()


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, chain(*one), chain(*other)))


def test_batches_are_words_and_those_that_follow(ptb):
    task = load(ptb)
    batches = list(task.batches(0))
    assert len(batches) == task.steps_per_epoch == (len(task.train) - 6) // 24
    text = task.train.tolist()
    segments = {tuple(text[i : i + 7]) for i in range(len(text) - 6)}
    for words, following in batches:
        assert words.shape == following.shape == (4, 6)
        assert words.dtype == torch.int64
        assert torch.equal(words[:, 1:], following[:, :-1])
        assert all(
            (*row.tolist(), last) in segments for row, last in zip(words, following[:, -1].tolist(), strict=True)
        )


def test_an_epoch_has_each_segment_once(ptb):
    task = load(ptb)
    # Numbers of places instead of words: what is predicted can then be told apart.
    task.train = torch.arange(len(task.train), dtype=torch.int32)
    for epoch in range(3):
        predicted = torch.cat([following.flatten() for _, following in task.batches(epoch)]).sort().values
        assert torch.equal(predicted, torch.arange(int(predicted[0]), int(predicted[0]) + len(predicted)))


def test_seed_and_epoch_decide_the_batches(ptb):
    first = list(load(ptb).batches(3))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert same(list(load(ptb).batches(3)), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert not same(list(load(ptb).batches(4)), first)
    assert not same(list(load(ptb, seed=1).batches(3)), first)


def test_batches_can_start_anywhere(ptb):
    task = load(ptb)
    assert same(list(task.batches(1, start=5)), list(task.batches(1))[5:])


def test_shares_make_up_the_batch(ptb):
    whole = list(load(ptb).batches(0))
    parts = [list(load(ptb, share=Share(rank, 2)).batches(0)) for rank in range(2)]
    joined = [tuple(torch.cat(pair) for pair in zip(*both, strict=True)) for both in zip(*parts, strict=True)]
    assert same(joined, whole)


def test_too_short_a_text_is_refused(ptb):
    with pytest.raises(ValueError, match="Invalid batch_size: 400"):
        load(ptb, batch_size=400)


@pytest.mark.parametrize("name", ["ptb-tensorized", "ptb-transformer"])
def test_the_loss_is_the_smoothed_cross_entropy(ptb, name):
    task = load(ptb, name, dropout=0.0)
    model = make_model(task)
    words, following = next(task.batches(0))
    logits = torch.stack([model(words, torch.full_like(words, word))[0] for word in range(task.vocabulary)], -1)
    expected = F.cross_entropy(logits.flatten(0, 1), following.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(task.loss(model, (words, following)), expected)


@pytest.mark.parametrize(
    ("name", "softmax"), [("ptb-tensorized", "full"), ("ptb-tensorized", "adaptive"), ("ptb-transformer", "full")]
)
def test_products_with_the_hessian_agree(ptb, name, softmax, monkeypatch):
    monkeypatch.setattr("adahessian.lab.tasks.language._CLUSTERS_BEGIN", (5, 12))
    task = load(ptb, name, softmax=softmax, width=16, dropout=0.0)
    model = make_model(task).double()
    batch = next(task.batches(0))
    params = dict(model.named_parameters())
    direction = {key: torch.randn_like(param) for key, param in params.items()}

    gradient = torch.autograd.grad(task.loss(model, batch), list(params.values()), create_graph=True)
    double_backward = torch.autograd.grad(gradient, list(params.values()), list(direction.values()))

    def loss(params):
        return task.loss(lambda *inputs: functional_call(model, params, inputs), batch)

    detached = {key: param.detach() for key, param in params.items()}
    _, forward_over_reverse = jvp(grad(loss), (detached,), (direction,))
    for one, other in zip(double_backward, forward_over_reverse.values(), strict=True):
        assert (one - other).norm() <= 1e-8 * one.norm()
        assert one.norm() > 0


def test_the_step_is_one_graph(ptb, monkeypatch):
    monkeypatch.setattr("adahessian.lab.tasks.language._CLUSTERS_BEGIN", (5, 12))
    task = load(ptb, softmax="adaptive", layers=1, width=16)
    model = make_model(task).eval()
    params = {key: param.detach() for key, param in model.named_parameters()}
    direction = {key: torch.ones_like(param) for key, param in params.items()}

    def product(params, batch):
        def loss(params):
            return task.loss(lambda *inputs: functional_call(model, params, inputs), batch)

        return jvp(grad(loss), (params,), (direction,))

    batch = next(task.batches(0))
    compiled = torch.compile(product, fullgraph=True, backend="eager")(params, batch)
    torch.testing.assert_close(compiled, product(params, batch))


@torch.no_grad()
def test_perplexity_predicts_every_word_once(ptb):
    task = load(ptb)
    model = make_model(task).eval()
    for text in (task.valid, task.held_out, task.train):
        losses = []
        for start in range(0, len(text) - 1, 6):
            # A segment at a time, the last one filled up with words that count for nothing.
            piece = F.pad(text[start : start + 7].long(), (0, 6))
            log_prob, _ = model(piece[None, :6], piece[None, 1:7])
            losses += (-log_prob[0, : len(text[start : start + 7]) - 1]).tolist()
        assert len(losses) == len(text) - 1
        expected = math.exp(sum(losses) / len(losses))
        assert task._perplexity(model, text) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_what_is_reported(ptb):
    task = load(ptb)
    model = make_model(task).eval()
    assert task.final_weights == "best"
    epoch, final = task.evaluate(model), task.test(model)
    assert set(epoch) == {"valid_perplexity", "train_perplexity"}
    assert set(final) == {"test_perplexity", "valid_perplexity", "train_perplexity"}
    assert epoch["valid_perplexity"] == final["valid_perplexity"]
    # Weights close to 0 predict every word alike.
    for value in (*epoch.values(), *final.values()):
        assert value == pytest.approx(task.vocabulary, rel=0.1)


@torch.no_grad()
def test_a_perplexity_beyond_all_bounds_is_infinite(ptb):
    task = load(ptb)
    assert task._perplexity(lambda words, _: (words * 0 - 1e4, words), task.valid) == math.inf


@pytest.mark.parametrize("name", ["ptb-tensorized", "ptb-transformer"])
def test_the_loss_falls(ptb, name):
    task = load(ptb, name, dropout=0.0)
    model = make_model(task)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for epoch in range(6):
        for batch in task.batches(epoch):
            loss = task.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    model.eval()
    assert task.test(model)["test_perplexity"] < 0.5 * task.vocabulary


def test_a_small_vocabulary_takes_a_full_softmax(ptb):
    with pytest.raises(ValueError, match="Invalid softmax: adaptive"):
        load(ptb, softmax="adaptive").make_model()


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_the_experiments_have_all_optimizers(experiment, ptb):
    assert set(experiment.defaults) == set(OPTIMIZER_NAMES)
    assert {experiment.curve.name} <= {"valid_perplexity"}
    assert not experiment.curve.higher_is_better
    assert not experiment.metric.higher_is_better


def test_the_papers_settings():
    ptb, wikitext = BY_NAME["ptb-tensorized"].defaults, BY_NAME["wikitext103-tensorized"].defaults
    assert (ptb["adahessian"].lr, wikitext["adahessian"].lr) == (2.0, 1.0)
    for settings in (ptb["adahessian"], wikitext["adahessian"]):
        assert (settings.block_size, settings.hessian_power, settings.epochs) == (4, 0.5, 30)
        assert (settings.dropout, settings.label_smoothing, settings.lr_warmup_steps) == (0.3, 0.1, 4000)
    assert (ptb["adamw"].lr, ptb["adamw"].batch_size, ptb["adamw"].segment) == (2.5e-4, 60, 32)
    assert (wikitext["adamw"].batch_size, wikitext["adamw"].segment, wikitext["adamw"].layers) == (120, 80, 6)
