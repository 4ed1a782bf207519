"""Fine-tuning of SqueezeBERT, or another BERT, on GLUE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from adahessian.lab.configs.checks import at_least, fraction
from adahessian.lab.configs.optimizers import SGD, Adagrad, AdaHessian, Adam, AdamW, OptimizerConfig, RMSprop
from adahessian.lab.configs.presets import Configs, preset, same_for, with_modern
from adahessian.lab.configs.run import Metric
from adahessian.lab.configs.schedule import ScheduleConfig

Dataset = Literal["rte", "mrpc", "stsb", "sst2", "qnli", "qqp", "mnli"]

_ACCURACY = Metric(name="accuracy", title="accuracy, %")
_ACCURACY_AND_F1 = Metric(name="accuracy_and_f1", title="mean of accuracy and F1, %")
_CORRELATION = Metric(name="correlation", title="mean of Pearson and Spearman correlation, %")
_SCORES = {"mrpc": _ACCURACY_AND_F1, "qqp": _ACCURACY_AND_F1, "stsb": _CORRELATION}


@dataclass(frozen=True, kw_only=True)
class GlueConfig:
    """Fine-tuning of a pre-trained encoder."""

    default_holdout: ClassVar[int] = 500

    batch_size: int = 16
    """Examples per batch, over all processes."""

    dataset: Dataset = "rte"
    """Dataset of GLUE."""

    model: str = "squeezebert"
    """Folder of the pre-trained model, in --data-dir or elsewhere."""

    max_length: int = 128
    """Most tokens of an example. The rest is cut off."""

    dropout: float = 0.1
    """Dropout in the encoder and before the classifier."""

    holdout: int = 0
    """Training examples to keep for validation. 0 evaluates on the dev set."""

    def __post_init__(self) -> None:
        at_least(2, max_length=self.max_length)
        at_least(0, holdout=self.holdout)
        fraction(below_one=True, dropout=self.dropout)

    @property
    def score(self) -> Metric:
        """What the dataset is scored by: its name is accuracy, accuracy_and_f1 or correlation."""
        return _SCORES.get(self.dataset, _ACCURACY)

    @property
    def dev_sets(self) -> tuple[str, ...]:
        """Names of the development sets. The first one decides."""
        return ("dev_matched", "dev_mismatched") if self.dataset == "mnli" else ("dev",)

    @property
    def metric(self) -> Metric:
        """Score on the first development set."""
        return self.score.on(self.dev_sets[0])

    @property
    def validation_metric(self) -> Metric:
        """Score on the examples that are held out, or else on the first development set."""
        return self.score.on("validation" if self.holdout else self.dev_sets[0])


def _optimizers(lr: float, *, adamw_lr: float = 2e-5, weight_decay: float = 0.0) -> dict[str, OptimizerConfig]:
    return with_modern(
        {
            "adahessian": AdaHessian(lr=lr, block_size=4),
            "adamw": AdamW(lr=adamw_lr, weight_decay=weight_decay),
            "adam": Adam(lr=adamw_lr),
            "sgd": SGD(lr=1e-2, momentum=0.9),
            "adagrad": Adagrad(lr=1e-3, eps=1e-10),
            "rmsprop": RMSprop(lr=adamw_lr),
        }
    )


def _configs(dataset: Dataset, *, lr: float = 1e-3, epochs: int = 5) -> Configs:
    return same_for(_optimizers(lr), GlueConfig(dataset=dataset), epochs=epochs, schedule=_LINEAR)


_LINEAR = ScheduleConfig(schedule="linear")

_NOTES = """
    The paper searched learning rates and dropout but does not give them. AdaHessian's learning rate, the linear
    schedule and the epochs are those of a later paper that ran it again. Dropout .1 is BERT's.

    The learning rates of the other optimizers are ours and were not searched. AdamW's is the most common one for
    fine-tuning BERT. There is no weight decay.

    The paper fine-tunes a SqueezeBERT that was fine-tuned on MNLI before. Pass such a checkpoint to do the same. Its
    encoder is used, its classifier is not.
    """

_F1_NOTES = f"""
    The paper does not say which score it reports. We take the mean of accuracy and F1, as GLUE does. Both are also
    reported on their own.
    {_NOTES}"""


def _data(folder: str, *files: str) -> str:
    names = ", ".join(f"{file}.tsv" for file in ("train", *(files or ("dev",))))
    return f"glue/{folder} with {names} as GLUE publishes them, and the folder of the pre-trained model."


@preset("glue-rte", title="fine-tuning on RTE", data=_data("RTE"), family_notes=_NOTES)
def glue_rte() -> Configs:
    """Entailment of a sentence by another: 2,490 pairs."""
    return _configs("rte", epochs=10)


@preset("glue-mrpc", title="fine-tuning on MRPC", data=_data("MRPC"), family_notes=_F1_NOTES)
def glue_mrpc() -> Configs:
    """Paraphrases from the news: 3,668 pairs."""
    return _configs("mrpc", lr=1e-2)


@preset("glue-stsb", title="fine-tuning on STS-B", data=_data("STS-B"), family_notes=_NOTES)
def glue_stsb() -> Configs:
    """Similarity of sentences from 0 to 5: 5,749 pairs.

    No learning rate of AdaHessian is published for this task. We take 1e-3, as for most others.
    """
    return _configs("stsb")


@preset("glue-sst2", title="fine-tuning on SST-2", data=_data("SST-2"), family_notes=_NOTES)
def glue_sst2() -> Configs:
    """Sentiment of phrases from film reviews: 67,349 examples."""
    return _configs("sst2")


@preset("glue-qnli", title="fine-tuning on QNLI", data=_data("QNLI"), family_notes=_NOTES)
def glue_qnli() -> Configs:
    """Whether a sentence answers a question: 104,743 pairs."""
    return _configs("qnli")


@preset("glue-qqp", title="fine-tuning on QQP", data=_data("QQP"), family_notes=_F1_NOTES)
def glue_qqp() -> Configs:
    """Duplicates among questions: 363,846 pairs."""
    return _configs("qqp", lr=1e-2)


@preset(
    "glue-mnli",
    title="fine-tuning on MNLI",
    data=_data("MNLI", "dev_matched", "dev_mismatched"),
    family_notes=_NOTES,
)
def glue_mnli() -> Configs:
    """Entailment in ten genres: 392,702 pairs. The score is the accuracy on the matched set.

    The accuracy on the mismatched set is dev_mismatched_accuracy. The paper has 81.84 with AdamW and 82.62 with
    AdaHessian.
    """
    return _configs("mnli")


@preset(
    "minilm-sst2",
    title="short fine-tuning of MiniLM on SST-2",
    data="glue/SST-2 with train.tsv and dev.tsv as GLUE publishes them, and the folder minilm-l6: MiniLM-L6 with "
    "config.json, vocab.txt and weights.",
)
def minilm_sst2() -> Configs:
    """Not in the paper: 150 steps with a batch of 32, to compare optimizers in minutes.

    AdamW's learning rate and weight decay are common ones for small encoders. The others were not searched.
    """
    task = GlueConfig(dataset="sst2", model="minilm-l6", batch_size=32)
    schedule = ScheduleConfig(schedule="linear", lr_warmup_steps=15)
    optimizers = _optimizers(5e-3, adamw_lr=2e-4, weight_decay=0.01)
    return same_for(optimizers, task, schedule=schedule, steps=150, eval_every=50)
