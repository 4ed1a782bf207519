"""transformers: the Trainer takes the steps of a plain loop, and resumes from its checkpoints."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerators import fresh_state, reset_accelerators  # noqa: F401 - a fixture
from ranks import Ranks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from adahessian import AdaHessian, AdaHessianKron, Curvature, param_groups
from adahessian.integrations.transformers import AdaHessianMixin, AdaHessianTrainer

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_text.py"
OPTIONS = {"eps": 1e-2, "block_size": 4, "curvature_every": 3, "curvature_warmup": 2}
# Models in float64 compute some of it, such as norms and the loss, in float32.
NEARLY = {"rtol": 1e-6, "atol": 1e-9}
WORDS, LENGTH = 17, 7


def language_model(dtype=torch.float64, dropout=0.0):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        attention_dropout=dropout,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(dtype)


class Classifier(nn.Module):
    """A module from outside transformers. Its loss is a mean over examples that ignores micro-batches."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(WORDS, 6), nn.Flatten(), nn.Linear(6 * LENGTH, 3), nn.Tanh())

    def forward(self, input_ids, labels=None):
        logits = self.layers(input_ids)
        loss = None if labels is None else cross_entropy(logits, labels[:, 0] % 3)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def classifier():
    torch.manual_seed(0)
    return Classifier().double()


def examples(padded=True, count=16):
    """Make sentences; if padded, the later ones have fewer words to predict."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (count, LENGTH), generator=generator)
    labels = words.clone()
    if padded:
        labels[torch.arange(LENGTH) > torch.randint(2, LENGTH, (count, 1), generator=generator)] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(words, labels, strict=True)]


def arguments(folder, **kwargs):
    settings = {
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 0.05,
        "weight_decay": 0.1,
        "max_grad_norm": 0.1,
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
    }
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    return Seq2SeqTrainingArguments(str(folder), **settings | quiet | kwargs)


def train(folder, model=None, dataset=None, trainer_class=AdaHessianTrainer, own=None, resume=None, **kwargs):
    reset_accelerators()
    trainer = trainer_class(
        model=language_model() if model is None else model,
        args=arguments(folder, **kwargs),
        train_dataset=examples() if dataset is None else dataset,
        **{"optimizer_class": AdaHessian, "optimizer_options": OPTIONS} | (own or {}),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def parameters(trainer):
    return [param.detach().clone() for param in trainer.model.parameters()]


def everything(trainer):
    return parameters(trainer), list(trainer.optimizer.optimizer.state_dict()["state"].values())


def made_optimizer(model):
    """Matrices decay. The vectors do not, because all vectors of this model are norms."""
    groups = param_groups(model, weight_decay=0.1, decay_bias_and_norm=False)
    return AdaHessian(groups, lr=0.05, **OPTIONS)


def linear_schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)


def plain_loop(model, loss_fn, dataset, **curvature_options):
    """Train without a Trainer: linear decay, clipping, and the mean over the words of all micro-batches."""
    optimizer = made_optimizer(model)
    schedule = linear_schedule(optimizer)
    curvature = Curvature(model, loss_fn, optimizer, **curvature_options)
    for step in range(4):
        few = dataset[4 * step : 4 * step + 4]
        batch = {name: torch.stack([each[name] for each in few]) for name in ("input_ids", "labels")}
        curvature.measure(batch)
        loss_fn(model, batch).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return list(model.parameters()), list(optimizer.state_dict()["state"].values())


def mean_over_words(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1).float()
    return cross_entropy(logits, batch["labels"][:, 1:].flatten())


def assert_same(one, other, **tolerance):
    torch.testing.assert_close(one, other, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
def test_is_the_plain_loop(tmp_path, autocast):
    def loss_fn(model, batch):
        words = (batch["labels"][:, 1:] != -100).sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(**batch, num_items_in_batch=words).loss

    trainer = train(tmp_path, language_model(torch.float32), bf16=autocast)
    assert trainer.model.config._attn_implementation == "sdpa"
    assert_same(everything(trainer), plain_loop(language_model(torch.float32), loss_fn, examples()))


def test_micro_batches_are_the_mean_over_all_their_words(tmp_path):
    trainer = train(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert_same(parameters(trainer), plain_loop(language_model(), mean_over_words, examples())[0], **NEARLY)


def test_curvature_options_reach_the_curvature(tmp_path):
    dataset, options = examples(padded=False), {"batch_fraction": 0.25}
    trainer = train(tmp_path, dataset=dataset, own={"curvature_options": options})
    expected = plain_loop(language_model(), mean_over_words, dataset, **options)
    assert_same(parameters(trainer), expected[0], **NEARLY)


def sum_over_items(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize(
    ("make", "own", "kwargs"),
    [
        (language_model, {}, {"label_smoothing_factor": 0.1}),
        (language_model, {"compute_loss_func": sum_over_items}, {}),
        (classifier, {}, {}),
    ],
    ids=["label smoothing", "compute_loss_func", "the Trainer"],
)
def test_micro_batches_are_the_whole_batch_whoever_normalizes(tmp_path, make, own, kwargs):
    kwargs |= {"max_grad_norm": 0.0}
    parts = train(tmp_path, make(), own=own, per_device_train_batch_size=1, gradient_accumulation_steps=4, **kwargs)
    whole = train(tmp_path, make(), own=own, **kwargs)
    assert_same(everything(parts), everything(whole), **NEARLY)


def test_resumes_from_a_checkpoint_after_evaluations(tmp_path):
    def trained(folder, resume=None):
        return train(
            folder,
            language_model(torch.float32, dropout=0.2),
            examples(count=40),
            own={"eval_dataset": examples(count=8)},
            resume=resume,
            max_steps=6,
            gradient_accumulation_steps=2,
            save_strategy="steps",
            save_steps=3,
            eval_strategy="steps",
            eval_steps=1,
            train_sampling_strategy="random",
            lr_scheduler_type="cosine",
        )

    through = trained(tmp_path / "through")
    resumed = trained(tmp_path / "resumed", str(tmp_path / "through" / "checkpoint-3"))
    assert resumed.optimizer.optimizer.param_groups[0]["measurements"] == 3  # steps 1, 2 and 5
    assert_same(everything(resumed), everything(through))


def test_measures_in_training_mode_and_only_when_due(tmp_path):
    calls = []

    class Watching(AdaHessianTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if torch.is_grad_enabled():  # an evaluation computes no gradients
                calls.append((model.training, self.state.global_step))
            return super().compute_loss(model, inputs, *args, **kwargs)

    own = {"eval_dataset": examples(count=4)}
    train(tmp_path, trainer_class=Watching, own=own, eval_strategy="steps", eval_steps=1, max_steps=6)
    assert all(training for training, _ in calls)
    # The first measurement may take several calls, to choose how to compute it.
    counts = [[step for _, step in calls].count(step) for step in range(6)]
    assert [count > 1 for count in counts] == [True, True, False, False, True, False]
    assert counts[1:] == [2, 1, 1, 2, 1]


def test_training_twice_measures_for_the_same_optimizer(tmp_path):
    trainer = train(tmp_path)
    trainer.train()  # wraps the model again
    assert trainer.optimizer.optimizer.param_groups[0]["measurements"] == 4  # steps 1, 2, 5 and 8


def test_takes_an_optimizer_and_a_scheduler(tmp_path):
    model = language_model()
    optimizer = made_optimizer(model)
    own = {"optimizers": (optimizer, linear_schedule(optimizer)), "optimizer_options": None}
    trainer = train(tmp_path, model, own=own)
    assert trainer.optimizer.optimizer is optimizer is trainer.curvature.optimizer
    assert_same(everything(trainer), everything(train(tmp_path)))


def test_exempts_from_weight_decay_what_the_trainer_exempts(tmp_path):
    def decays(trainer_class):
        reset_accelerators()
        model = language_model()
        model.model.layers[0].requires_grad_(False)
        trainer = trainer_class(model=model, args=arguments(tmp_path))
        names = {param: name for name, param in model.named_parameters()}
        groups = trainer.create_optimizer().param_groups
        return {names[param]: group["weight_decay"] for group in groups for param in group["params"]}

    found = decays(AdaHessianTrainer)
    assert found == decays(Trainer)
    assert set(found.values()) == {0.0, 0.1}


def test_mixes_into_other_trainers(tmp_path):
    class Mixed(AdaHessianMixin, Seq2SeqTrainer):
        pass

    assert_same(everything(train(tmp_path, trainer_class=Mixed)), everything(train(tmp_path)))


# Several processes ---------------------------------------------------------------------------------------------------


def train_on_ranks(rank, size, folder):
    trainer = train(folder, per_device_train_batch_size=1, gradient_accumulation_steps=2, ddp_backend="gloo")
    return type(trainer.model_wrapped).__name__, everything(trainer)


@pytest.mark.xdist_group("ranks")
def test_ranks_are_one_process_on_all_their_words(tmp_path):
    ranks = Ranks(2)
    try:
        (name, here), (_, there) = ranks(train_on_ranks, tmp_path)
    finally:
        ranks.stop()
    assert name == "DistributedDataParallel"
    assert_same(here, there)
    assert_same(here[0], parameters(train(tmp_path)), **NEARLY)


# Errors, installing and running --------------------------------------------------------------------------------------


def test_warns_of_the_default_learning_rate(tmp_path):
    options = {"model": language_model(), "args": TrainingArguments(str(tmp_path), use_cpu=True)}
    with pytest.warns(UserWarning, match="learning_rate"):
        AdaHessianTrainer(optimizer_class=AdaHessian, **options).create_optimizer()


def test_trains_with_factors_unless_told_otherwise(tmp_path, recwarn):
    trainer = train(tmp_path, own={"optimizer_class": AdaHessianKron, "optimizer_options": {"block_size": 4}})
    assert isinstance(trainer.optimizer.optimizer, AdaHessianKron)
    assert trainer.curvature.batch_fraction == AdaHessianKron.default_batch_fraction
    assert all(param.isfinite().all() for param in parameters(trainer))
    reset_accelerators()
    default = AdaHessianTrainer(model=language_model(), args=TrainingArguments(str(tmp_path), use_cpu=True))
    assert type(default.create_optimizer()) is AdaHessianKron
    assert not [each for each in recwarn if "learning_rate" in str(each.message)]


def test_rejects_options_for_an_optimizer_that_it_does_not_create(tmp_path):
    model = language_model()
    with pytest.raises(ValueError, match="optimizer_options"):
        train(tmp_path, model, own={"optimizers": (made_optimizer(model), None)})


def test_rejects_data_parallel(tmp_path):
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match="DataParallel"):
        AdaHessianTrainer(model=language_model(), args=args)


@pytest.mark.parametrize("library", ["transformers", "accelerate"])
def test_names_the_extra(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"adahessian.integrations.{library}")
    monkeypatch.delitem(sys.modules, "adahessian.integrations.transformers", raising=False)
    with pytest.raises(ImportError, match=rf"adahessian\[{library}\]"):
        importlib.import_module("adahessian.integrations.transformers")


def test_the_example_runs_from_anywhere(tmp_path):
    run = subprocess.run(
        [sys.executable, EXAMPLE, "--steps", "20"], cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout.split()[-1]) < 4.0, run.stdout
