"""Fine-tuning of SqueezeBERT, or another BERT, on GLUE."""

from typing import Annotated, ClassVar, Literal

from adahessian.lab.configs.checks import BelowOne, Count, Natural, Options, minimum
from adahessian.lab.configs.optimizers import SGD, Adagrad, AdaHessian, Adam, AdamW, OptimizerConfig, RMSprop
from adahessian.lab.configs.presets import Configs, preset, same_for, with_modern
from adahessian.lab.configs.run import Metric, ScheduleConfig

Dataset = Literal["rte", "mrpc", "stsb", "sst2", "qnli", "qqp", "mnli"]

_ACCURACY = Metric(name="accuracy", title="accuracy, %")
_ACCURACY_AND_F1 = Metric(name="accuracy_and_f1", title="mean of accuracy and F1, %")
_CORRELATION = Metric(name="correlation", title="mean of Pearson and Spearman correlation, %")
_SCORES = {"mrpc": _ACCURACY_AND_F1, "qqp": _ACCURACY_AND_F1, "stsb": _CORRELATION}


class GlueConfig(Options):
    """Fine-tuning of a pre-trained encoder."""

    default_holdout: ClassVar[int] = 500

    batch_size: Count = 16  # Examples per batch, over all processes.
    dataset: Dataset = "rte"  # Dataset of GLUE.
    model: str = "squeezebert"  # Folder of the pre-trained model, in --data-dir or elsewhere.
    max_length: Annotated[int, minimum(2)] = 128  # Maximum number of tokens per example. The rest is cut off.
    dropout: BelowOne = 0.1  # Dropout in the encoder and before the classifier.
    holdout: Natural = 0  # Training examples to keep for validation. 0 evaluates on the dev set.

    @property
    def score(self) -> Metric:
        """The score of the dataset, named accuracy, accuracy_and_f1 or correlation."""
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
    optimizers = {
        "adahessian": AdaHessian(lr=lr, block_size=4),
        "adamw": AdamW(lr=adamw_lr, weight_decay=weight_decay),
        "adam": Adam(lr=adamw_lr),
        "sgd": SGD(lr=1e-2, momentum=0.9),
        "adagrad": Adagrad(lr=1e-3, eps=1e-10),
        "rmsprop": RMSprop(lr=adamw_lr),
    }
    return with_modern(optimizers)


_NOTES = """
    AdaHessian's learning rate, the schedule and the epochs are from a later paper that used AdaHessian again. Other
    learning rates are ours and were not searched. The paper starts from a SqueezeBERT that was fine-tuned on MNLI.
    """
_F1_NOTES = f"""
    The paper does not say which score it reports. Ours is the mean of accuracy and F1, as in GLUE.
    {_NOTES}"""


def _register(dataset: Dataset, folder: str, about: str, *, lr: float = 1e-3, epochs: int = 5) -> None:
    task, schedule = GlueConfig(dataset=dataset), ScheduleConfig(schedule="linear")
    files = ", ".join(f"{name}.tsv" for name in ("train", *task.dev_sets))
    data = f"glue/{folder} with {files} as GLUE publishes them, and the folder of the pre-trained model."
    notes = _F1_NOTES if task.score is _ACCURACY_AND_F1 else _NOTES

    @preset(f"glue-{dataset}", f"fine-tuning on {folder}", data, f"{about}\n{notes}")
    def configs() -> Configs:
        return same_for(_optimizers(lr), task, epochs=epochs, schedule=schedule)


_register("rte", "RTE", "Whether one sentence entails another: 2,490 pairs.", epochs=10)
_register("mrpc", "MRPC", "Paraphrases from the news: 3,668 pairs.", lr=1e-2)
_register("stsb", "STS-B", "Similarity of sentences from 0 to 5: 5,749 pairs. AdaHessian's learning rate is ours.")
_register("sst2", "SST-2", "Sentiment of phrases from film reviews: 67,349 examples.")
_register("qnli", "QNLI", "Whether a sentence answers a question: 104,743 pairs.")
_register("qqp", "QQP", "Duplicates among questions: 363,846 pairs.", lr=1e-2)
_register("mnli", "MNLI", "Entailment in ten genres: 392,702 pairs. The score is the matched set's accuracy.")

_MINILM = "glue/SST-2 as in glue-sst2, and the folder minilm-l6: MiniLM-L6 with config.json, vocab.txt and weights."


@preset("minilm-sst2", "short fine-tuning of MiniLM on SST-2", _MINILM)
def minilm_sst2() -> Configs:
    """Not in the paper. A comparison of optimizers that takes minutes. Learning rates were not searched."""
    task = GlueConfig(dataset="sst2", model="minilm-l6", batch_size=32)
    schedule = ScheduleConfig(schedule="linear", lr_warmup_steps=15)
    optimizers = _optimizers(5e-3, adamw_lr=2e-4, weight_decay=0.01)
    return same_for(optimizers, task, schedule=schedule, steps=150, eval_every=50)
