from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score
from transformers import BertConfig, BertModel, SqueezeBertConfig, SqueezeBertModel

from adahessian.lab import glue_metrics
from adahessian.lab.data.errors import DataError
from adahessian.lab.models.sentence_classifier import SentenceClassifier
from adahessian.lab.tasks.glue import EXPERIMENTS, find_checkpoint
from adahessian.lab.tasks.task import Place, Share

ALONE = Share()
WORDS = ["a", "b", "c", "d", "e", "f", "g", "h", "good", "bad", "fine", "poor"]
SMALL = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
}
BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}


def write_checkpoint(folder, *, squeeze=False, prefix="", rename=lambda name: name, drop=(), extra=None):
    """A small pre-trained model in float16, with the weights that it has."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    torch.manual_seed(1)
    if squeeze:
        encoder = SqueezeBertModel(SqueezeBertConfig(**SMALL, embedding_size=8))
    else:
        encoder = BertModel(BertConfig(**SMALL))
    for param in encoder.parameters():
        torch.nn.init.normal_(param, std=0.5)
    encoder.config.save_pretrained(folder)
    saved = {rename(prefix + name): weight.half() for name, weight in encoder.state_dict().items() if name not in drop}
    saved.update(extra or {})
    save_file(saved, folder / "model.fp16.safetensors")
    return {name: weight.half().float() for name, weight in encoder.state_dict().items()}


def write_task(data_dir, form, header, rows, dev=("dev",)):
    folder = data_dir / "glue" / form
    folder.mkdir(parents=True)
    for name in ("train", *dev):
        (folder / f"{name}.tsv").write_text("\n".join([header, *rows]) + "\n")


SST2_ROWS = [f"{word} {'good' if n % 2 else 'bad'} {'a ' * (n % 7)}\t{n % 2}" for n, word in enumerate(WORDS * 4)][:45]
STSB_ROWS = [f"{first}\t{second}\t{n % 6}" for n, (first, second) in enumerate(zip(WORDS, WORDS[::-1], strict=True))]
MRPC_ROWS = [f"{n % 2}\t0\t0\t{first} bad\tgood" for n, first in enumerate(WORDS)]
MNLI_ROWS = [f"{first}\tgood\t{('neutral', 'contradiction', 'entailment')[n % 3]}" for n, first in enumerate(WORDS)]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_checkpoint(folder / "small")
    write_checkpoint(folder / "squeezed", squeeze=True, prefix="transformer.")
    write_task(folder, "SST-2", "sentence\tlabel", SST2_ROWS)
    write_task(folder, "STS-B", "sentence1\tsentence2\tscore", STSB_ROWS)
    write_task(folder, "MRPC", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", MRPC_ROWS)
    write_task(folder, "MNLI", "sentence1\tsentence2\tgold_label", MNLI_ROWS, dev=("dev_matched", "dev_mismatched"))
    return folder


def load(data_dir, name="glue-sst2", *, seed=0, share=ALONE, model="small", **changes):
    experiment = BY_NAME[name]
    settings = replace(experiment.defaults["adahessian"], model=model, max_length=16, **changes)
    return experiment.load(settings, Place(data_dir=data_dir, device=torch.device("cpu"), seed=seed, share=share))


def equal(some, others):
    return len(some) == len(others) and all(
        torch.equal(one[key], other[key]) for one, other in zip(some, others, strict=True) for key in one
    )


def test_an_epoch_has_every_example_once_in_an_order_that_seed_and_epoch_decide(data_dir):
    task = load(data_dir)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    epoch = list(task.batches(3))
    assert torch.equal(torch.rand(3), expected)
    assert [len(batch["labels"]) for batch in epoch] == [16, 16, 13]
    assert task.steps_per_epoch == 3
    seen = [(tuple(row.tolist()), label) for b in epoch for row, label in zip(b["tokens"], b["labels"], strict=True)]
    every = [tuple(task._training.batch(torch.tensor([n]), 16)["tokens"][0].tolist()) for n in range(45)]
    assert sorted(tokens for tokens, _ in seen) == sorted(every)
    torch.manual_seed(9)
    assert equal(list(load(data_dir).batches(3)), epoch)
    assert not equal(list(task.batches(4)), epoch)
    assert not equal(list(load(data_dir, seed=1).batches(3)), epoch)


def test_an_epoch_goes_on_where_it_stopped(data_dir):
    task = load(data_dir)
    assert equal(list(task.batches(1, start=2)), list(task.batches(1))[2:])


def test_processes_take_equal_parts_of_every_batch(data_dir):
    whole = list(load(data_dir).batches(0))
    parts = [list(load(data_dir, share=Share(rank, 2)).batches(0)) for rank in range(2)]
    for batch, one, other in zip(whole, *parts, strict=True):
        size = len(batch["labels"]) // 2 * 2
        assert torch.equal(torch.cat([one["labels"], other["labels"]]), batch["labels"][:size])
        assert torch.equal(torch.cat([one["tokens"], other["tokens"]]), batch["tokens"][:size])
    # One example of 45 is too few for two processes.
    assert load(data_dir, batch_size=22).steps_per_epoch == 3
    assert load(data_dir, batch_size=22, share=Share(0, 2)).steps_per_epoch == 2


def jvp_and_double_backward(task, model, batch):
    params = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    probe = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in params.items()}
    gradients = torch.autograd.grad(task.loss(model, batch), list(params.values()), create_graph=True)
    slope = sum((g * z).sum() for g, z in zip(gradients, probe.values(), strict=True))
    backward = torch.autograd.grad(slope, list(params.values()))

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self):
            return task.loss(self.model, batch)

    def loss(values):
        return torch.func.functional_call(Loss(), {f"model.{name}": value for name, value in values.items()}, ())

    fixed = {name: param.detach() for name, param in params.items()}
    _, forward = torch.func.jvp(torch.func.grad(loss), (fixed,), (probe,))
    flat = torch.cat([product.flatten() for product in backward])
    return flat, torch.cat([forward[name].flatten() for name in params])


@pytest.mark.parametrize("model", ["small", "squeezed"])
@pytest.mark.parametrize("name", ["glue-sst2", "glue-stsb"])
def test_both_exact_products_agree(data_dir, name, model):
    task = load(data_dir, name, model=model, dropout=0.0)
    torch.manual_seed(0)
    backward, forward = jvp_and_double_backward(task, task.make_model().double(), _double(next(task.batches(0))))
    assert backward.norm() > 0
    assert (forward - backward).norm() <= 1e-8 * backward.norm()


def _double(batch):
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def test_the_loss_can_be_traced_whole(data_dir):
    task = load(data_dir, dropout=0.0)
    model, batch = task.make_model(), next(task.batches(0))
    traced = torch.compile(task.loss, fullgraph=True, backend="eager")(model, batch)
    torch.testing.assert_close(traced, task.loss(model, batch))


def test_the_loss_is_the_mean_over_any_slice(data_dir):
    for name in ("glue-sst2", "glue-stsb"):
        task = load(data_dir, name)
        model, batch = task.make_model().eval(), next(task.batches(0))
        halves = [{key: value[part] for key, value in batch.items()} for part in (slice(0, 6), slice(6, 12))]
        whole = {key: value[:12] for key, value in batch.items()}
        mean = (task.loss(model, halves[0]) + task.loss(model, halves[1])) / 2
        torch.testing.assert_close(task.loss(model, whole), mean)


@pytest.mark.parametrize("model", ["small", "squeezed"])
def test_padding_changes_nothing(data_dir, model):
    task = load(data_dir, model=model)
    network, batch = task.make_model().eval(), next(task.batches(0))
    alone = {key: value[:1] for key, value in batch.items()}
    length = int(alone["mask"].sum())
    assert length < alone["mask"].shape[1]
    short = {key: value[:, :length] if value.dim() == 2 else value for key, value in alone.items()}
    torch.testing.assert_close(task.loss(network, alone), task.loss(network, short))


@pytest.mark.parametrize(
    ("name", "scores"),
    [
        ("glue-sst2", {"dev_accuracy"}),
        ("glue-mrpc", {"dev_accuracy", "dev_f1", "dev_accuracy_and_f1"}),
        ("glue-stsb", {"dev_pearson", "dev_spearman", "dev_correlation"}),
        ("glue-mnli", {"dev_matched_accuracy", "dev_mismatched_accuracy"}),
    ],
)
def test_each_task_has_its_scores(data_dir, name, scores):
    task = load(data_dir, name)
    with torch.no_grad():
        assert set(task.evaluate(task.make_model().eval())) == scores
    assert {BY_NAME[name].curve.name, BY_NAME[name].metric.name} <= scores


def test_the_development_set_is_what_is_scored(data_dir):
    task = load(data_dir)
    torch.manual_seed(0)
    model = task.make_model().eval()
    batch = task._dev["dev"].batch(torch.arange(45), 16)
    with torch.no_grad():
        # Both classes are found about as often, so that it matters which example has which label.
        model.transformer.classifier.bias -= model(batch["tokens"], batch["types"], batch["mask"]).median(0).values
        found = model(batch["tokens"], batch["types"], batch["mask"]).argmax(1)
        assert 10 < found.sum() < 35
        right = (found == batch["labels"]).double().mean().item()
        assert task.evaluate(model)["dev_accuracy"] == pytest.approx(100 * right)


def test_scores_are_those_of_the_reference_libraries():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(50, 2, generator=generator), torch.randint(2, (50,), generator=generator)
    scores = glue_metrics.accuracy_and_f1(logits, labels)
    right, f1 = (logits.argmax(1) == labels).double().mean().item(), f1_score(labels, logits.argmax(1))
    assert scores == pytest.approx({"accuracy": 100 * right, "f1": 100 * f1, "accuracy_and_f1": 50 * (right + f1)})
    # Scores are often the same: ranks have ties.
    found, wanted = torch.randn(50, 1, generator=generator), (torch.rand(50, generator=generator) * 6).floor()
    pearson, spearman = pearsonr(found.squeeze(1), wanted).statistic, spearmanr(found.squeeze(1), wanted).statistic
    assert glue_metrics.correlation(found, wanted) == pytest.approx(
        {"pearson": 100 * pearson, "spearman": 100 * spearman, "correlation": 50 * (pearson + spearman)}, rel=1e-5
    )


def test_scores_of_a_model_that_says_always_the_same():
    assert glue_metrics.correlation(torch.ones(4, 1), torch.arange(4.0))["correlation"] == 0
    never = torch.tensor([[1.0, 0.0]]).expand(4, 2)
    assert glue_metrics.accuracy_and_f1(never, torch.tensor([1, 0, 1, 1])) == pytest.approx(
        {"accuracy": 25.0, "f1": 0.0, "accuracy_and_f1": 12.5}
    )


# Checkpoints ---------------------------------------------------------------------------------------------------------


def encoder_of(model):
    return model.transformer.base_model.state_dict()


@pytest.mark.parametrize("squeeze", [False, True])
@pytest.mark.parametrize("with_prefix", [False, True])
def test_weights_are_found_by_name_with_or_without_the_prefix(tmp_path, squeeze, with_prefix):
    prefix = ("transformer." if squeeze else "bert.") if with_prefix else ""
    old_head = {"classifier.weight": torch.ones(7, 8), "cls.bias": torch.ones(3)} if with_prefix else {}
    position_ids = {f"{prefix}embeddings.position_ids": torch.arange(32)[None]}
    weights = write_checkpoint(tmp_path, squeeze=squeeze, prefix=prefix, extra={**old_head, **position_ids})
    loaded = SentenceClassifier(tmp_path, outputs=3)
    for name, weight in encoder_of(loaded).items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, weights[name]), name
    assert loaded.transformer.classifier.weight.shape == (3, 8)


def test_old_names_of_layer_norms_are_known(tmp_path):
    def old(name):
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    weights = write_checkpoint(tmp_path, rename=old)
    loaded = encoder_of(SentenceClassifier(tmp_path, outputs=2))
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())


def test_a_torch_file_is_read_without_running_what_is_in_it(tmp_path):
    weights = write_checkpoint(tmp_path)
    (tmp_path / "model.fp16.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    assert torch.equal(
        encoder_of(SentenceClassifier(tmp_path, outputs=2))["pooler.dense.bias"], weights["pooler.dense.bias"]
    )
    torch.save({"weights": pytest.approx}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"pytorch_model\.bin cannot be read"):
        SentenceClassifier(tmp_path, outputs=2)


def test_the_new_head_comes_from_the_random_stream(data_dir):
    task = load(data_dir)

    def head(seed):
        torch.manual_seed(seed)
        return task.make_model().transformer.classifier.weight

    assert torch.equal(head(0), head(0))
    assert not torch.equal(head(0), head(1))


def test_a_missing_pooler_is_new(tmp_path):
    write_checkpoint(tmp_path, drop=("pooler.dense.weight", "pooler.dense.bias"))
    SentenceClassifier(tmp_path, outputs=2)


def test_dropout_is_everywhere(data_dir):
    model = load(data_dir, dropout=0.25).make_model()
    rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.25}
    assert model.training


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drop": ("encoder.layer.1.output.dense.bias",)}, r"Missing: encoder\.layer\.1\.output\.dense\.bias\."),
        ({"extra": {"encoder.more": torch.ones(1)}}, r"Unexpected: encoder\.more"),
        ({"extra": {"pooler.dense.bias": torch.ones(3)}}, r"do not fit config\.json .*size mismatch"),
    ],
)
def test_says_which_weights_do_not_fit(tmp_path, settings, message):
    write_checkpoint(tmp_path, **settings)
    with pytest.raises(DataError, match=f"(?s){message}"):
        SentenceClassifier(tmp_path, outputs=2)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, r"config\.json is missing"),
        ("config.json", '{"model_type": "unheard-of"}', r"config\.json does not describe a model"),
        ("config.json", "{", r"config\.json does not describe a model"),
        ("model.fp16.safetensors", None, "has no weights"),
        ("model.fp16.safetensors", "short", r"model\.fp16\.safetensors cannot be read"),
    ],
)
def test_says_what_is_wrong_with_a_checkpoint(tmp_path, file, content, message):
    write_checkpoint(tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(DataError, match=message):
        SentenceClassifier(tmp_path, outputs=2)


def test_a_checkpoint_is_in_the_data_folder_or_anywhere(tmp_path, data_dir):
    assert find_checkpoint("small", data_dir) == data_dir / "small"
    assert find_checkpoint(str(data_dir / "small"), tmp_path) == data_dir / "small"
    with pytest.raises(DataError, match=r"no folder none in .*: put the checkpoint there"):
        find_checkpoint("none", data_dir)


def test_says_that_vocabulary_or_length_are_too_large(tmp_path, data_dir):
    write_checkpoint(tmp_path / "large")
    with (tmp_path / "large" / "vocab.txt").open("a") as vocabulary:
        vocabulary.write("\nq\nr\ns\nt\n")
    with pytest.raises(DataError, match=r"vocab\.txt has 21 tokens, but the model of config\.json knows 20"):
        load(data_dir, model=str(tmp_path / "large"))
    experiment = BY_NAME["glue-sst2"]
    settings = replace(experiment.defaults["adamw"], model="small", max_length=33)
    with pytest.raises(DataError, match="reads 32 tokens at the most, but max_length is 33"):
        experiment.load(settings, Place(data_dir=data_dir, device=torch.device("cpu"), seed=0))


# Training ------------------------------------------------------------------------------------------------------------


def test_there_is_an_experiment_for_each_of_the_papers_datasets():
    assert list(BY_NAME) == [f"glue-{name}" for name in ("rte", "mrpc", "stsb", "sst2", "qnli", "qqp", "mnli")]
    for experiment in EXPERIMENTS:
        settings = experiment.defaults["adahessian"]
        assert (settings.block_size, settings.hessian_power, settings.batch_size) == (4, 1.0, 16)
        assert settings.epochs == (10 if experiment.name == "glue-rte" else 5)
        assert settings.lr == (1e-2 if experiment.name in ("glue-mrpc", "glue-qqp") else 1e-3)
        assert len(experiment.defaults) == 6
    # The mean of eight results in the paper's table, with MNLI's second.
    means = [experiment.paper["adahessian"].mean for experiment in EXPERIMENTS]
    assert round((sum(means) + 82.62) / 8, 2) == 87.32


def test_a_few_epochs_teach_it_which_words_are_good(data_dir):
    task = load(data_dir, dropout=0.0)
    torch.manual_seed(0)
    model = task.make_model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for epoch in range(25):
        for batch in task.batches(epoch):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
    with torch.no_grad():
        assert task.evaluate(model.eval())["dev_accuracy"] > 95
