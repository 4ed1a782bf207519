"""transformers: the Trainer takes the steps of a plain loop, and resumes from its checkpoints."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerators import fresh_state, reset_accelerators  # noqa: F401 - a fixture
from ranks import Ranks
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from adahessian import AdaHessian, AdaHessianKron, Curvature, param_groups
from adahessian.integrations.side_effects import attributes_restored
from adahessian.integrations.transformers import optimizer

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


def settings(folder, **kwargs):
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 0.05,
        "weight_decay": 0.1,
        "max_grad_norm": 0.1,
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
    }
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    return defaults | quiet | kwargs


def arguments(folder, **kwargs):
    return Seq2SeqTrainingArguments(**settings(folder, **kwargs))


def ours(**kwargs):
    return optimizer(AdaHessian, **OPTIONS, **kwargs)


def train(folder, model=None, dataset=None, trainer_class=Trainer, own=None, resume=None, **kwargs):
    reset_accelerators()
    trainer = trainer_class(
        model=language_model() if model is None else model,
        args=arguments(folder, **kwargs),
        train_dataset=examples() if dataset is None else dataset,
        **{"optimizer_cls_and_kwargs": ours()} | (own or {}),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def parameters(trainer):
    return [param.detach().clone() for param in trainer.model.parameters()]


def everything(trainer):
    return parameters(trainer), list(trainer.optimizer.optimizer.state_dict()["state"].values())


def plain_loop(model, loss_fn, dataset=None, **curvature_options):
    """Train without a Trainer: linear decay, clipping, and the mean over the words of all micro-batches."""
    dataset = examples() if dataset is None else dataset
    # Matrices decay. The vectors do not, because all vectors of these models are norms and biases.
    groups = param_groups(model, weight_decay=0.1, decay_bias_and_norm=False)
    for group in groups:
        group["params"] = [(name, param) for name, param in group["params"] if param.requires_grad]
    groups = [group for group in groups if group["params"]]
    optimizer = AdaHessian(groups, lr=0.05, **OPTIONS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)
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
    assert_same(everything(trainer), plain_loop(language_model(torch.float32), loss_fn))


def test_curvature_options_reach_the_curvature(tmp_path):
    dataset, options = examples(padded=False), {"batch_fraction": 0.25}
    own = {"optimizer_cls_and_kwargs": ours(curvature_options=options)}
    expected = plain_loop(language_model(), mean_over_words, dataset, **options)
    assert_same(parameters(train(tmp_path, dataset=dataset, own=own)), expected[0], **NEARLY)


def smoothed_mean_over_words(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    return cross_entropy(logits, batch["labels"][:, 1:].flatten(), label_smoothing=0.1)


def mean_over_items(outputs, labels, num_items_in_batch=None):
    return cross_entropy(outputs.logits, labels[:, 0] % 3, reduction="sum") / num_items_in_batch


def mean_over_labels(model, batch):
    return mean_over_items(model(batch["input_ids"]), batch["labels"], (batch["labels"] != -100).sum())


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize(
    ("make", "loss_fn", "own", "kwargs"),
    [
        (language_model, mean_over_words, {}, {}),
        (language_model, smoothed_mean_over_words, {}, {"label_smoothing_factor": 0.1}),
        (classifier, mean_over_labels, {"compute_loss_func": mean_over_items}, {}),
        (classifier, lambda model, batch: model(**batch).loss, {}, {}),
    ],
    ids=["num_items_in_batch", "label smoothing", "compute_loss_func", "the model's mean"],
)
def test_micro_batches_are_the_plain_loop_on_whole_batches(tmp_path, make, loss_fn, own, kwargs, parts):
    kwargs |= {"per_device_train_batch_size": 4 // parts, "gradient_accumulation_steps": parts}
    assert_same(parameters(train(tmp_path, make(), own=own, **kwargs)), plain_loop(make(), loss_fn)[0], **NEARLY)


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


class Watching(Trainer):
    """A Trainer with its own loss, which counts calls in a list and in an attribute."""

    seen = []  # noqa: RUF012 - a class attribute is not restored, so it counts measurements too

    def compute_loss(self, model, inputs, *args, **kwargs):
        if torch.is_grad_enabled():  # an evaluation computes no gradients
            self.seen.append((model.training, self.state.global_step))
            self.losses = [*getattr(self, "losses", []), "loss"]
            self.logs = getattr(self, "logs", {"losses": []})
            self.logs["losses"].append("loss")
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_measures_in_training_mode_and_only_when_due(tmp_path):
    Watching.seen.clear()
    own = {"eval_dataset": examples(count=4)}
    trainer = train(tmp_path, trainer_class=Watching, own=own, eval_strategy="steps", eval_steps=1, max_steps=6)
    assert all(training for training, _ in Watching.seen)
    # The first measurement may take several calls, to choose how to compute it.
    counts = [[step for _, step in Watching.seen].count(step) for step in range(6)]
    assert [count > 1 for count in counts] == [True, True, False, False, True, False]
    assert counts[1:] == [2, 1, 1, 2, 1]
    assert len(trainer.losses) == len(trainer.logs["losses"]) == 6  # measurements do not count


def test_training_twice_measures_for_the_same_optimizer(tmp_path):
    trainer = train(tmp_path)
    trainer.train()  # wraps the model again
    assert trainer.optimizer.optimizer.param_groups[0]["measurements"] == 4  # steps 1, 2, 5 and 8


def test_a_new_optimizer_replaces_the_measurements_of_the_old(tmp_path):
    trainer = train(tmp_path, trainer_class=Watching)
    Watching.seen.clear()
    trainer.optimizer = trainer.lr_scheduler = None  # as a search for hyperparameters does
    trainer.train()
    assert [[step for _, step in Watching.seen].count(step) for step in range(1, 4)] == [2, 1, 1]
    assert trainer.optimizer.optimizer.param_groups[0]["measurements"] == 2


def test_exempts_from_weight_decay_what_the_trainer_exempts(tmp_path):
    def decays(method):
        reset_accelerators()
        model = language_model()
        model.model.layers[0].requires_grad_(False)
        trainer = Trainer(model=model, args=arguments(tmp_path), optimizer_cls_and_kwargs=method)
        names = {param: name for name, param in model.named_parameters()}
        groups = trainer.create_optimizer().param_groups
        return {names[param]: group["weight_decay"] for group in groups for param in group["params"]}

    found = decays(ours())
    assert found == decays(None)
    assert set(found.values()) == {0.0, 0.1}


# Other Trainers and models -------------------------------------------------------------------------------------------


def test_trainers_without_the_argument_take_an_attribute(tmp_path):
    def model():
        torch.manual_seed(0)
        sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        sizes |= {"d_model": 8, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "max_position_embeddings": 8}
        return BartForConditionalGeneration(BartConfig(vocab_size=WORDS, dropout=0.0, **sizes)).double()

    trainer = Seq2SeqTrainer(model(), arguments(tmp_path), train_dataset=examples())
    trainer.optimizer_cls_and_kwargs = ours()
    trainer.train()
    expected = plain_loop(model(), lambda model, batch: model(**batch).loss)[0]
    assert_same(parameters(trainer), expected, **NEARLY)


@pytest.mark.filterwarnings("ignore:.*checkpointing:FutureWarning")  # transformers has renamed the arguments
def test_measures_through_checkpointed_layers(tmp_path):
    plain, checkpointed = (train(tmp_path, gradient_checkpointing=each) for each in (False, True))
    assert checkpointed.model.model.gradient_checkpointing
    assert_same(everything(checkpointed), everything(plain), **NEARLY)


def test_scales_the_measured_loss_as_the_gradient(tmp_path):
    class Scaled(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # fp16=True needs a GPU

    unscaled, scaled = (train(tmp_path, trainer_class=each, max_grad_norm=0.0) for each in (Trainer, Scaled))
    assert scaled.compute_loss.curvature.scaler is scaled.accelerator.scaler
    assert_same(everything(scaled), everything(unscaled), **NEARLY)


LOSSES = pytest.mark.parametrize(
    ("loss_fn", "kwargs"),
    [(mean_over_words, {}), (smoothed_mean_over_words, {"label_smoothing_factor": 0.1})],
    ids=["plain", "label smoothing"],
)


@LOSSES
@pytest.mark.filterwarnings("ignore")
def test_trains_adapters(tmp_path, loss_fn, kwargs):
    peft = pytest.importorskip("peft")

    def model():
        adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(language_model(), adapters)

    kwargs |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = train(tmp_path, model(), **kwargs)
    assert_same(parameters(trainer), plain_loop(model(), loss_fn)[0], **NEARLY)


@LOSSES
@pytest.mark.filterwarnings("ignore")
def test_trains_with_trl(tmp_path, loss_fn, kwargs):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    words = Tokenizer(WordLevel({str(word): word for word in range(WORDS)}, unk_token="0"))
    kwargs |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": False}
    dataset = [{name: row.tolist() for name, row in each.items()} for each in examples()]
    dataset = [{**each, "attention_mask": [1] * LENGTH} for each in dataset]
    prepared = {"skip_prepare_dataset": True}
    trainer = trl.SFTTrainer(
        language_model(),
        trl.SFTConfig(**settings(tmp_path, **kwargs), dataset_kwargs=prepared, remove_unused_columns=False),
        data_collator=default_data_collator,
        train_dataset=datasets.Dataset.from_list(dataset),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="0"),
        optimizer_cls_and_kwargs=ours(),
    )
    trainer.train()
    # The fused head computes the gradient in float32.
    assert_same(parameters(trainer), plain_loop(language_model(), loss_fn)[0], rtol=1e-4, atol=1e-5)
    assert trainer._total_train_tokens == 16 * LENGTH  # measurements do not count


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
    assert_same(here[0], plain_loop(language_model(), mean_over_words)[0], **NEARLY)


# Errors, installing and running --------------------------------------------------------------------------------------


def test_warns_of_the_default_learning_rate(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    trainer = Trainer(model=language_model(), args=args, optimizer_cls_and_kwargs=optimizer(AdaHessian))
    with pytest.warns(UserWarning, match="learning_rate"):
        trainer.create_optimizer()


def test_trains_with_factors_unless_told_otherwise(tmp_path, recwarn):
    trainer = train(tmp_path, own={"optimizer_cls_and_kwargs": optimizer(block_size=4)})
    assert isinstance(trainer.optimizer.optimizer, AdaHessianKron)
    assert trainer.compute_loss.curvature.batch_fraction == AdaHessianKron.default_batch_fraction
    assert all(param.isfinite().all() for param in parameters(trainer))
    reset_accelerators()
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    default = Trainer(model=language_model(), args=args, optimizer_cls_and_kwargs=optimizer())
    assert default.create_optimizer().param_groups[0]["lr"] == args.learning_rate
    assert not [each for each in recwarn if "learning_rate" in str(each.message)]


def test_rejects_data_parallel(tmp_path):
    args = arguments(tmp_path)
    args._n_gpu = 2
    trainer = Trainer(model=language_model(), args=args, optimizer_cls_and_kwargs=ours())
    with pytest.raises(ValueError, match="n_gpu"):
        trainer.create_optimizer()


def test_rejects_a_function_that_chooses_a_part(tmp_path):
    chosen = ours(curvature_options={"batch_fraction": lambda batch: batch})
    trainer = Trainer(model=language_model(), args=arguments(tmp_path), optimizer_cls_and_kwargs=chosen)
    with pytest.raises(ValueError, match="batch_fraction"):
        trainer.create_optimizer()


def test_another_optimizer_is_not_measured_for(tmp_path):
    trainer = train(tmp_path, trainer_class=Watching)
    Watching.seen.clear()
    trainer.optimizer, trainer.lr_scheduler = torch.optim.SGD(trainer.model.parameters(), 0.01), None
    trainer.train()
    assert [[step for _, step in Watching.seen].count(step) for step in range(1, 4)] == [1, 1, 1]


def test_attributes_that_contain_each_other_are_restored():
    owner = SimpleNamespace(table={}, entries=[])
    owner.table["self"], owner.table["entries"] = owner.table, owner.entries
    before = dict(vars(owner))
    with attributes_restored(owner):
        owner.entries.append(1)
        assert owner.table["self"] is owner.table is not before["table"]
        assert owner.table["entries"] == [1]
    assert all(vars(owner)[name] is before[name] for name in before)
    assert owner.entries == []


def test_rejects_versions_that_know_no_factories():
    factory, options = ours()
    with pytest.raises(RuntimeError, match="optimizer_cls_and_kwargs") as raised:
        factory([{"params": []}], **options)
    assert transformers.__version__ in str(raised.value)


def test_rejects_other_callers():
    factory, options = ours()
    with pytest.raises(RuntimeError, match="optimizer_cls_and_kwargs"):
        factory()(language_model(), **options)


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
