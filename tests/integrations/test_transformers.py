"""transformers: the Trainer takes the steps of a loop that is written out, and goes on from its checkpoints."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerators import forget_accelerators, fresh_state  # noqa: F401 - a fixture
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

from adahessian import AdaHessian, Curvature, param_groups
from adahessian.integrations.transformers import AdaHessianMixin, AdaHessianTrainer

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_text.py"
ADAHESSIAN = {"eps": 1e-2, "block_size": 4, "update_every": 3, "warmup_steps": 2}
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
    """A module that is none of transformers, with a mean over examples that knows of no micro-batches."""

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
    """Sentences; the later ones, if padded, have fewer words to predict."""
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


def train(folder, model=None, dataset=None, trainer_class=AdaHessianTrainer, curvature=None, own=None, **kwargs):
    forget_accelerators()
    trainer = trainer_class(
        model=language_model() if model is None else model,
        args=arguments(folder, **kwargs),
        train_dataset=examples() if dataset is None else dataset,
        adahessian_settings=ADAHESSIAN,
        curvature_settings=curvature,
        **own or {},
    )
    trainer.train()
    return trainer


def parameters(trainer):
    return [param.detach().clone() for param in trainer.model.parameters()]


def everything(trainer):
    return parameters(trainer), list(trainer.optimizer.optimizer.state_dict()["state"].values())


def stacked(few):
    return {name: torch.stack([each[name] for each in few]) for name in ("input_ids", "labels")}


def made_optimizer(model):
    """Matrices decay, vectors do not: of this model the latter are the norms."""
    groups = param_groups(model, weight_decay=0.1, decay_bias_and_norm=False)
    return AdaHessian(groups, lr=0.05, **ADAHESSIAN)


def written_out(model, loss_fn, dataset, steps=4, size=4, micro_batches=1, **curvature):
    """The loop without a Trainer: linear decay, clipping, and the mean over the words of all micro-batches."""
    optimizer = made_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    measured = Curvature(model, loss_fn, optimizer, **curvature)
    for step in range(steps):
        start = step * size % len(dataset)
        batch = stacked(dataset[start : start + size])
        measured.measure({name: tensor[: size // micro_batches] for name, tensor in batch.items()})
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
def test_is_the_loop_written_out(tmp_path, autocast):
    def loss_fn(model, batch):
        words = (batch["labels"][:, 1:] != -100).sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(**batch, num_items_in_batch=words).loss

    trainer = train(tmp_path, language_model(torch.float32), bf16=autocast)
    assert trainer.model.config._attn_implementation == "sdpa"
    assert_same(everything(trainer), written_out(language_model(torch.float32), loss_fn, examples()))


def test_micro_batches_are_the_mean_over_all_their_words(tmp_path):
    trainer = train(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert_same(parameters(trainer), written_out(language_model(), mean_over_words, examples())[0], **NEARLY)


def test_the_first_micro_batch_stands_for_all(tmp_path):
    kwargs = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    dataset = examples(padded=False)
    trainer = train(tmp_path, dataset=dataset, curvature={"accumulate": False}, **kwargs)
    expected = written_out(language_model(), mean_over_words, dataset, micro_batches=2)
    assert_same(parameters(trainer), expected[0], **NEARLY)


def test_a_part_of_the_batch_stands_for_all(tmp_path):
    dataset = examples(padded=False)
    trainer = train(tmp_path, dataset=dataset, curvature={"batch_fraction": 0.25})
    expected = written_out(language_model(), mean_over_words, dataset, batch_fraction=0.25)
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
def test_micro_batches_are_the_whole_batch_whoever_normalises(tmp_path, make, own, kwargs):
    kwargs |= {"max_grad_norm": 0.0}
    parts = train(tmp_path, make(), own=own, per_device_train_batch_size=1, gradient_accumulation_steps=4, **kwargs)
    whole = train(tmp_path, make(), own=own, **kwargs)
    assert_same(everything(parts), everything(whole), **NEARLY)


def test_goes_on_from_a_checkpoint_after_evaluations(tmp_path):
    def trained(folder, resume=None):
        forget_accelerators()
        trainer = AdaHessianTrainer(
            model=language_model(torch.float32, dropout=0.2),
            args=arguments(
                folder,
                max_steps=6,
                gradient_accumulation_steps=2,
                save_strategy="steps",
                save_steps=3,
                eval_strategy="steps",
                eval_steps=1,
                train_sampling_strategy="random",
                lr_scheduler_type="cosine",
            ),
            train_dataset=examples(count=40),
            eval_dataset=examples(count=8),
            adahessian_settings=ADAHESSIAN,
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    through = trained(tmp_path / "through")
    resumed = trained(tmp_path / "resumed", str(tmp_path / "through" / "checkpoint-3"))
    assert resumed.optimizer.optimizer.param_groups[0]["measurements"] == 3  # steps 1, 2 and 5
    assert_same(everything(resumed), everything(through))


def test_measures_in_training_mode_and_only_when_due(tmp_path):
    modes = []

    class Watching(AdaHessianTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if torch.is_grad_enabled():  # an evaluation takes no gradients
                modes.append(model.training)
            return super().compute_loss(model, inputs, *args, **kwargs)

    own = {"eval_dataset": examples(count=4)}
    trainer = train(tmp_path, trainer_class=Watching, own=own, eval_strategy="steps", eval_steps=1)
    # Of four steps the first two measure; what is written out is compared with torch's once.
    assert modes == [True] * (4 + 2 + 2)
    trainer.train()
    assert modes == [True] * (8 + 4 + 2)  # and so do the fifth and the eighth


def test_takes_an_optimizer_and_a_scheduler(tmp_path):
    model = language_model()
    optimizer = made_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)
    trainer = AdaHessianTrainer(
        model=model, args=arguments(tmp_path), train_dataset=examples(), optimizers=(optimizer, schedule)
    )
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer is trainer.curvature.optimizer
    assert_same(everything(trainer), everything(train(tmp_path)))


def test_exempts_from_weight_decay_what_the_trainer_exempts(tmp_path):
    def decays(trainer_class):
        forget_accelerators()
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


# What it refuses, installing and running -----------------------------------------------------------------------------


def test_says_that_the_default_learning_rate_is_that_of_adamw(tmp_path):
    trainer = AdaHessianTrainer(model=language_model(), args=TrainingArguments(str(tmp_path), use_cpu=True))
    with pytest.warns(UserWarning, match=r"5e-05.*0\.15"):
        trainer.create_optimizer()


def test_refuses_settings_beside_an_optimizer(tmp_path):
    model = language_model()
    with pytest.raises(ValueError, match="put them into your own"):
        AdaHessianTrainer(
            model=model,
            args=arguments(tmp_path),
            optimizers=(made_optimizer(model), None),
            adahessian_settings=ADAHESSIAN,
        )


def test_refuses_data_parallel(tmp_path):
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match="torchrun"):
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
