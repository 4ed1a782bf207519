import dataclasses
import math

import pytest
import torch
from sacrebleu import corpus_bleu
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from adahessian.base.batches import slice_batch
from adahessian.hessian.attention import plain_attention
from adahessian.lab.data.errors import DataError
from adahessian.lab.data.token_batches import END, PADDING, START, Sentences, TokenBatches
from adahessian.lab.settings import OPTIMIZER_NAMES
from adahessian.lab.tasks.task import Place, Share
from adahessian.lab.tasks.translation import EXPERIMENTS

NUMBERS = {"ein": "one", "zwei": "two", "drei": "three", "vier": "four", "fünf": "five", "sechs": "six"}
SIZES = {"layers": 1, "width": 16, "feed_forward": 24, "heads": 2, "vocabulary": 290, "batch_size": 256}


def experiment(name):
    return next(experiment for experiment in EXPERIMENTS if experiment.name == name)


def sentences(count, seed):
    generator = torch.Generator().manual_seed(seed)
    german = list(NUMBERS)
    return [
        [german[word] for word in torch.randint(6, (int(length),), generator=generator)]
        for length in torch.randint(2, 14, (count,), generator=generator)
    ]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("multi30k")
    for number, (name, count) in enumerate([("train", 120), ("val", 15), ("test_2016_flickr", 12)]):
        rows = sentences(count, number)
        (folder / f"{name}.de").write_text("".join(" ".join(row) + "\n" for row in rows))
        (folder / f"{name}.en").write_text("".join(" ".join(NUMBERS[word] for word in row) + "\n" for row in rows))
    return folder


@pytest.fixture
def load(folder):
    def load(name="multi30k-de-en", *, seed=0, share=None, **changes):
        settings = dataclasses.replace(experiment(name).defaults["adahessian"], **{**SIZES, **changes})
        place = Place(data_dir=folder, device=torch.device("cpu"), seed=seed, share=share or Share())
        return experiment(name).load(settings, place)

    return load


def alike(first, second):
    first, second = list(first), list(second)
    return len(first) == len(second) and all(
        torch.equal(one, other) for pair in zip(first, second, strict=True) for one, other in zip(*pair, strict=True)
    )


def rows_of(batches):
    """All pairs, without padding."""
    rows = []
    for source, _, said in batches:
        for one, other in zip(source.tolist(), said.tolist(), strict=True):
            rows.append(tuple(tuple(token for token in side if token != PADDING) for side in (one, other)))
    return sorted(rows)


def test_every_pair_comes_once_an_epoch(load):
    task = load()
    batches = list(task.batches(0))
    assert len(batches) == task.steps_per_epoch == sum(1 for _ in task.batches(1))
    rows = rows_of(batches)
    assert len(rows) == 120
    assert rows == rows_of(task.batches(5))
    sources, targets = ([task.subwords.decode([row[side]])[0] for row in rows] for side in (0, 1))
    assert sorted(sources) == sorted(" ".join(row) for row in sentences(120, 0))
    assert [" ".join(NUMBERS[word] for word in text.split()) for text in sources] == targets


def test_batches_are_as_large_as_they_may_be_and_of_few_shapes(load):
    batches = list(load().batches(0))
    assert all(part.shape == batch[0].shape for batch in batches for part in batch)
    assert all(batch[0].shape[1] % 8 == 0 and batch[0].numel() <= 256 for batch in batches)
    # All but the one with the shortest pairs are full.
    assert sum(batch[0].shape[0] != 256 // batch[0].shape[1] for batch in batches) <= 1


def test_the_decoder_reads_what_it_said_before(load):
    for source, read, said in load().batches(0):
        assert (read[:, 0] == START).all()
        shifted = torch.where(said[:, :-1] == END, PADDING, said[:, :-1])
        assert torch.equal(read[:, 1:], shifted)
        assert ((said == END).sum(1) == 1).all()
        assert ((source == END).sum(1) == 1).all()
        assert (said.flip(1)[torch.arange(len(said)), (said.flip(1) != PADDING).int().argmax(1)] == END).all()


def test_a_seed_an_epoch_and_a_number_decide_a_batch(load):
    torch.manual_seed(1)
    first = list(load().batches(3))
    state = torch.get_rng_state()
    task = load()
    assert alike(task.batches(3), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not alike(task.batches(4), first)
    assert not alike(load(seed=1).batches(3), first)
    for start in (1, 4, len(first)):
        assert alike(task.batches(3, start), first[start:])


def test_processes_share_each_batch(load):
    whole = list(load().batches(2))
    shares = [list(load(share=Share(rank, 2)).batches(2)) for rank in range(2)]
    assert len(shares[0]) == len(shares[1]) == load(share=Share(1, 2)).steps_per_epoch
    assert len(shares[0]) == len(whole)
    assert all(one[0].shape == other[0].shape for one, other in zip(*shares, strict=True))
    for batch, one, other in zip(whole, *shares, strict=True):
        count = len(batch[0]) // 2
        assert torch.equal(torch.cat([one[2], other[2]]), batch[2][: 2 * count])


def test_a_batch_with_too_few_pairs_for_all_processes_is_left_out():
    lengths = [30, 30, 3]
    side = Sentences([[5] * length for length in lengths])
    assert len(TokenBatches(side, side, 64)) == 2
    assert len(TokenBatches(side, side, 64, share=Share(0, 2))) == 1


def test_a_slice_is_a_fair_sample_of_its_batch():
    side = Sentences([[5] * length for length in range(17, 24) for _ in range(20)])
    batches = TokenBatches(side, side, 24 * 140)
    (batch,) = batches.epoch(0)
    first, second = ((part != PADDING).sum(1).double().mean() for part in batch[0].chunk(2))
    assert abs(first - second) < 1


def test_long_pairs_are_left_out_of_the_training_and_of_nothing_else(load):
    task = load(max_sentence=8)
    assert max(len(side) for row in rows_of(task.batches(0)) for side in row) == 9
    assert len(task.training.source) < 120
    assert len(task.validation.source) == 15
    assert max(task.test_batches.source.lengths) > 8
    assert len(task.references) == 12


def test_no_batch_is_an_error_that_says_why(load):
    with pytest.raises(DataError, match="no batch can be made of 120 training pairs, of which 0 have at most 1 tokens"):
        load(max_sentence=1)


def test_the_loss_is_the_mean_over_tokens_that_are_no_padding(load):
    task = load(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
    torch.manual_seed(0)
    model = task.make_model().double()
    batch = next(task.batches(0))
    for part in (batch, slice_batch(batch, 0.4)):
        source, read, said = part
        logs = model(source, read).log_softmax(-1)
        losses = []
        for row, place in (said != PADDING).nonzero().tolist():
            right = -logs[row, place, said[row, place]]
            losses.append(0.9 * right - 0.1 * logs[row, place].mean())
        torch.testing.assert_close(task.loss(model, part), torch.stack(losses).mean())
    assert task.loss(model, slice_batch(batch, 0.4)) != task.loss(model, batch)


class Loss(torch.nn.Module):
    """A task's loss as a module, for functional_call."""

    def __init__(self, task, model):
        super().__init__()
        self.task, self.model = task, model

    def forward(self, batch):
        return self.task.loss(self.model, batch)


def forward_over_reverse(loss, params, probe, batch):
    return jvp(grad(lambda values: functional_call(loss, values, (batch,))), (params,), (probe,))[1]


def test_products_with_the_hessian_agree(load):
    task = load(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
    torch.manual_seed(0)
    loss = Loss(task, task.make_model().double())
    batch = next(task.batches(0))
    params = dict(loss.named_parameters())
    probe = {name: torch.randn_like(param) for name, param in params.items()}
    with sdpa_kernel(SDPBackend.MATH):
        gradients = torch.autograd.grad(loss(batch), list(params.values()), create_graph=True)
        products = torch.autograd.grad(gradients, list(params.values()), list(probe.values()))
        detached = {name: param.detach() for name, param in params.items()}
        forward = forward_over_reverse(loss, detached, probe, batch)
    scale = max(map(torch.linalg.vector_norm, products))
    for product, name in zip(products, params, strict=True):
        assert torch.linalg.vector_norm(product - forward[name]) <= 1e-8 * scale
        # What is added to all keys alike changes no attention.
        assert torch.linalg.vector_norm(product) > 1e-6 * scale or name.endswith("key.bias")


def test_the_loss_can_be_compiled_whole(load):
    task = load()
    model = task.make_model()
    batch = next(task.batches(0))
    # As the curvature is compiled: some functions can be, but not inside of this.
    with plain_attention():
        torch.manual_seed(0)
        compiled = torch.compile(task.loss, fullgraph=True, backend="eager")(model, batch)
        torch.manual_seed(0)
        torch.testing.assert_close(compiled, task.loss(model, batch))


def test_the_model_is_the_one_that_is_set(load):
    task = load(layers=2, width=32, feed_forward=40, heads=4, dropout=0.25, attention_dropout=0.5)
    model = task.make_model()
    assert model.training
    assert model.tokens.weight.shape == (290, 32)
    assert len(model.encoder) == len(model.decoder) == 2
    assert model.encoder[0].feed_forward[0].out_features == 40
    assert (model.decoder[0].attention.heads, model.decoder[0].attention.dropout, model.dropout.p) == (4, 0.5, 0.25)
    assert model.decoder[0].feed_forward[2].p == 0.1


@torch.no_grad()
def test_the_validation_is_per_token_and_not_smoothed(load, monkeypatch):
    task = load()
    torch.manual_seed(0)
    model = task.make_model().eval()
    values = task.evaluate(model)
    total, tokens = 0.0, 0
    for number in range(15):
        batch = task.validation.batch(torch.tensor([number]), 48)
        losses = torch.nn.functional.cross_entropy(model(*batch[:2])[0], batch[2][0], ignore_index=0, reduction="sum")
        total, tokens = total + losses.item(), tokens + int((batch[2] != PADDING).sum())
    assert values == {
        "valid_loss": pytest.approx(total / tokens, rel=1e-5),
        "valid_perplexity": pytest.approx(math.exp(total / tokens), rel=1e-5),
    }
    monkeypatch.setattr("adahessian.lab.tasks.translation.EVALUATED_TOKENS", 64)
    assert load().evaluate(model)["valid_loss"] == pytest.approx(values["valid_loss"], rel=1e-5)


def test_a_small_model_learns_to_translate(load):
    task = load(
        width=32, feed_forward=64, vocabulary=280, label_smoothing=0.0, dropout=0.0, attention_dropout=0.0, beam_size=2
    )
    torch.manual_seed(0)
    model = task.make_model()
    with torch.no_grad():
        before = task.evaluate(model.eval())["valid_loss"]
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=5e-3)
    for epoch in range(12):
        for batch in task.batches(epoch):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        assert task.evaluate(model)["valid_loss"] < before / 3
        result = task.test(model)
        translations = task.translate(model)
    assert result["bleu"] > 10
    assert result["bleu"] == result["bleu_detokenized"] == corpus_bleu(translations, [task.references]).score
    assert result["test_perplexity"] == pytest.approx(math.exp(result["test_loss"]))


@pytest.mark.parametrize("name", [experiment.name for experiment in EXPERIMENTS])
def test_an_experiment_is_whole(name):
    chosen = experiment(name)
    assert set(chosen.defaults) == set(OPTIMIZER_NAMES)
    assert chosen.curve.name == "valid_loss"
    assert not chosen.curve.higher_is_better
    ours = chosen.defaults["adahessian"]
    assert (ours.block_size, ours.betas, ours.weight_decay) == (32, (0.9, 0.98), 1e-4)
    assert ours.width % 32 == 0
    assert all(settings.schedule == "inverse-sqrt" for settings in chosen.defaults.values())


def test_prepared_text_is_compared_word_by_word_without_case(load, monkeypatch):
    task = load("iwslt14-de-en", beam_size=1)
    monkeypatch.setattr(task, "translate", lambda model: [text.upper() for text in task.references])
    with torch.no_grad():
        result = task.test(task.make_model().eval())
    assert result["bleu"] == pytest.approx(100)


def test_the_other_direction_keeps_case(load, monkeypatch):
    task = load("wmt14-en-de", beam_size=1)
    assert set(" ".join(task.references).split()) == set(NUMBERS)
    monkeypatch.setattr(task, "translate", lambda model: [text.upper() for text in task.references])
    with torch.no_grad():
        assert task.test(task.make_model().eval())["bleu"] < 10
