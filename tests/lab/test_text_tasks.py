"""Translation, language modelling and GLUE."""

import math

import pytest
import torch
import torch.nn.functional as F
from small_tasks import load
from tiny_data import GERMAN, write_multi30k, write_novels, write_ptb, write_sst2, write_stsb

from adahessian.lab.errors import ConfigError, DataError
from adahessian.lab.tasks.glue import find_checkpoint


@pytest.fixture
def folder(tmp_path):
    for write in (write_ptb, write_novels):
        write(tmp_path)
    (tmp_path / "multi30k").mkdir()
    write_multi30k(tmp_path / "multi30k")
    return tmp_path


def test_long_pairs_are_left_out_of_training_only(folder):
    task = load("multi30k-de-en", folder, max_sentence=8)
    assert task.training.source.lengths.max() <= 8
    assert len(task.training.source.lengths) < 60
    assert (len(task.validation.source.lengths), len(task.references)) == (8, 8)
    assert task.test.source.lengths.max() > 8
    with pytest.raises(ConfigError, match="--max-sentence 1 "):
        load("multi30k-de-en", folder, max_sentence=1)


@torch.no_grad()
@pytest.mark.parametrize("name", ["multi30k-de-en", "iwslt14-de-en", "wmt14-en-de"])
def test_bleu_compares_as_the_paper_does(folder, name):
    task = load(name, folder / "multi30k")
    task.translate = lambda model: [text.upper() for text in task.references]
    assert {*" ".join(task.references).split()} == {*GERMAN}
    found = task.evaluate(task.build_model().eval(), final=True)
    assert (found["bleu"] == pytest.approx(100)) == (name == "iwslt14-de-en")  # the others compare with case
    assert found["test_perplexity"] == pytest.approx(math.exp(found["test_loss"]))


@pytest.mark.parametrize("name", ["ptb-tensorized", "gpt-chars"])
def test_an_epoch_predicts_every_place_of_a_stretch_once(folder, name):
    task = load(name, folder)
    task.train = torch.arange(len(task.train), dtype=torch.int32)  # places instead of tokens
    starts = set()
    for epoch in range(4):
        tokens, following = (torch.cat(parts) for parts in zip(*task.batches(epoch), strict=True))
        assert torch.equal(following, tokens + 1)
        assert tokens.shape == (task.steps_per_epoch * 4, 8)
        places = tokens.flatten().sort().values
        assert torch.equal(places, torch.arange(int(places[0]), int(places[0]) + len(places)))
        starts.add(int(places[0]))
    assert len(starts) > 1
    assert max(starts) < 8


def test_a_text_is_too_short(folder):
    with pytest.raises(ConfigError, match="--batch-size 400"):
        load("ptb-tensorized", folder, batch_size=400)
    with pytest.raises(ConfigError, match="--softmax adaptive"):
        load("ptb-tensorized", folder, softmax="adaptive").build_model()


@torch.no_grad()
@pytest.mark.parametrize("name", ["ptb-tensorized", "gpt-chars"])
def test_every_token_is_evaluated_once(folder, name):
    task = load(name, folder)
    model = task.build_model().eval()
    for text in (task.valid, task.test, task.train[:83]):
        losses = []
        for start in range(0, len(text) - 1, 8):
            # One segment at a time. Padding at the end of the last one does not count.
            piece = F.pad(text[start : start + 9].long(), (0, 8))
            each = task.token_losses(model, piece[None, :8], piece[None, 1:9])
            losses += each[0, : len(text[start : start + 9]) - 1].tolist()
        assert len(losses) == len(text) - 1
        assert task.evaluated_loss(model, text).item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    loss = task.evaluated_loss(model, task.valid).item()
    found = task.evaluate(model)
    assert found["valid_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    if name == "gpt-chars":
        text = (folder / "valid.txt").read_text()
        bits = loss / math.log(2) * len(text.encode()) / len(text)
        assert found["valid_bits_per_character"] == pytest.approx(bits, rel=1e-5)


@torch.no_grad()
def test_the_development_set_of_glue_is_scored(tmp_path):
    write_sst2(tmp_path)
    task = load("glue-sst2", tmp_path)
    model = task.build_model().eval()
    batch = task._batch(*task._dev["dev"], torch.arange(45))
    labels = batch.pop("labels")
    # About as many examples of each class, so that it matters which example has which label.
    model.classifier.bias -= model(**batch).logits.median(0).values
    found = model(**batch).logits.argmax(1)
    assert 10 < found.sum() < 35
    assert task.evaluate(model)["dev_accuracy"] == pytest.approx(100 * (found == labels).double().mean().item())


@pytest.mark.parametrize("write", [write_sst2, write_stsb], ids=["BERT", "SqueezeBERT"])
def test_padding_changes_no_loss_of_glue(tmp_path, write):
    write(tmp_path)
    task = load(write.__name__.replace("write_", "glue-"), tmp_path)
    model, batch = task.build_model().eval(), next(task.batches(0))
    one = {key: value[:1] for key, value in batch.items()}
    length = int(one["attention_mask"].sum())
    assert length < one["attention_mask"].shape[1]
    short = {key: value[:, :length] if value.dim() == 2 else value for key, value in one.items()}
    torch.testing.assert_close(task.loss(model, one), task.loss(model, short))
    with pytest.raises(DataError, match="--model"):
        find_checkpoint("none", tmp_path)
    assert find_checkpoint(str(tmp_path / "small"), tmp_path / "elsewhere") == tmp_path / "small"
