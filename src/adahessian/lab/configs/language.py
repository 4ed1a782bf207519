"""Language modelling: the paper's Transformers on Penn Treebank and WikiText, and GPTs on text files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from adahessian.lab.configs.checks import at_least, fraction
from adahessian.lab.configs.optimizers import SGD, Adagrad, AdaHessian, Adam, AdamW, RMSprop
from adahessian.lab.configs.presets import Configs, preset, same_for, with_modern
from adahessian.lab.configs.run import Metric
from adahessian.lab.configs.schedule import ScheduleConfig
from adahessian.lab.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WordConfig:
    """Prediction of words with a Transformer, as in the paper."""

    holdout: ClassVar[int] = 0
    default_holdout: ClassVar[int] = 0
    metric: ClassVar[Metric] = Metric(name="test_perplexity", title="test perplexity", higher_is_better=False)
    validation_metric: ClassVar[Metric] = replace(metric, name="valid_perplexity", title="validation perplexity")

    batch_size: int = 60
    """Segments per batch, over all processes."""

    text: Literal["ptb", "wikitext2", "wikitext103"] = "ptb"
    """Text to learn from."""

    attention: Literal["tensorized", "ordinary"] = "tensorized"
    """Multi-linear attention, or softmax attention."""

    layers: int = 3
    """Layers."""

    width: int = 256
    """Size of a word's embedding."""

    head_width: int = 40
    """Size of an attention head. Tensorized attention has one head."""

    feed_forward: int = 2100
    """Hidden units of a feed-forward network."""

    segment: int = 32
    """Words per segment. Segments do not see each other."""

    dropout: float = 0.3
    """Dropout of activations."""

    label_smoothing: float = 0.1
    """Share of the target's probability that is spread over all words."""

    softmax: Literal["full", "adaptive"] = "full"
    """All words with tied embeddings, or clusters of rarer words."""

    def __post_init__(self) -> None:
        at_least(
            1,
            layers=self.layers,
            width=self.width,
            head_width=self.head_width,
            feed_forward=self.feed_forward,
            segment=self.segment,
        )
        fraction(below_one=True, dropout=self.dropout, label_smoothing=self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Prediction of characters or subwords with a GPT."""

    holdout: ClassVar[int] = 0
    default_holdout: ClassVar[int] = 0
    metric: ClassVar[Metric] = Metric(
        name="test_loss", title="test loss, nats per token", higher_is_better=False, digits=3
    )
    validation_metric: ClassVar[Metric] = replace(metric, name="valid_loss", title="validation loss, nats per token")

    batch_size: int = 16
    """Sequences per batch, over all processes."""

    tokens: Literal["bytes", "bpe"] = "bytes"
    """Bytes, or subwords that are learned from the training text."""

    vocabulary: int = 256
    """Number of tokens: 256 for bytes."""

    layers: int = 2
    """Layers."""

    width: int = 128
    """Size of an embedding."""

    heads: int = 4
    """Attention heads per layer."""

    context: int = 128
    """Tokens per sequence."""

    dropout: float = 0.0
    """Dropout of activations."""

    def __post_init__(self) -> None:
        at_least(1, layers=self.layers, width=self.width, heads=self.heads)
        at_least(2, context=self.context)
        at_least(256, vocabulary=self.vocabulary)
        fraction(below_one=True, dropout=self.dropout)
        if self.width % self.heads:
            raise ConfigError(f"--width {self.width} is not a multiple of --heads {self.heads}. Change one of them.")
        if self.tokens == "bytes" and self.vocabulary != 256:
            raise ConfigError(f"--vocabulary {self.vocabulary} needs --tokens bpe. Bytes have a vocabulary of 256.")


def _words(task: WordConfig, *, adahessian_lr: float = 2.0) -> Configs:
    optimizers = {
        "adahessian": AdaHessian(lr=adahessian_lr, block_size=4, hessian_power=0.5),
        "adamw": AdamW(lr=2.5e-4),
        "adam": Adam(lr=2.5e-4),
        "sgd": SGD(lr=0.5, momentum=0.9, clip_norm=0.25),
        "adagrad": Adagrad(lr=0.01),
        "rmsprop": RMSprop(lr=2.5e-4),
    }
    schedule = ScheduleConfig(schedule="inverse-sqrt", lr_warmup_steps=4000)
    return same_for(with_modern(optimizers), task, epochs=30, schedule=schedule, final_weights="best")


_NOTES = """
    train_perplexity is that of the tested weights. The training loss contains dropout and label smoothing.

    The paper gives 4,000 warm-up steps, but not the schedule after them. Here it is the inverse square root, for every
    optimizer.

    The paper gives no learning rate for SGD, and nothing for Adam, Adagrad and RMSprop: these are ours. SGD's, with
    clipped gradients, was the best of 0.5, 2 and 5 in 400 steps of a small network. No other was searched.
    """

_TENSORIZED_NOTES = f"""
    The tensorized transformer's published code never applies its mask, so words see the words they predict. This
    implementation is causal. Compare its optimizers with each other, not with the paper's perplexities.

    AdamW's 2.5e-4 is from the tensorized transformer's scripts. No memory is carried from segment to segment.
    {_NOTES}"""

_PTB = "ptb.train.txt, ptb.valid.txt and ptb.test.txt, as Mikolov prepared them, there or in the sub-folder ptb."
_WIKITEXT = "wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, there or in the sub-folder"


@preset(
    "ptb-tensorized",
    title="tensorized transformer on Penn Treebank",
    data=_PTB,
    family_notes=_TENSORIZED_NOTES,
)
def ptb_tensorized() -> Configs:
    """Embeddings are tied to the softmax, the default of the code that the tensorized transformer is built on."""
    return _words(WordConfig())


@preset(
    "wikitext103-tensorized",
    title="tensorized transformer on WikiText-103",
    data=f"{_WIKITEXT} wikitext-103.",
    family_notes=_TENSORIZED_NOTES,
)
def wikitext103_tensorized() -> Configs:
    """The softmax is adaptive. Its clusters begin at words 20,000, 40,000 and 200,000.

    Each cluster is a quarter as wide as the one before. Embeddings are not tied.

    Every cluster is computed for every word, so a batch has 10 GB of logits. On a small GPU, use fewer segments.
    """
    task = WordConfig(text="wikitext103", batch_size=120, layers=6, segment=80, softmax="adaptive")
    return _words(task, adahessian_lr=1.0)


@preset(
    "wikitext2-tensorized",
    title="tensorized transformer on WikiText-2",
    data=f"{_WIKITEXT} wikitext-2.",
    family_notes=_TENSORIZED_NOTES,
)
def wikitext2_tensorized() -> Configs:
    """Not in the paper. The settings are those of ptb-tensorized."""
    return _words(WordConfig(text="wikitext2"))


@preset("ptb-transformer", title="ordinary Transformer on Penn Treebank", data=_PTB, family_notes=_NOTES)
def ptb_transformer() -> Configs:
    """Not in the paper: ptb-tensorized with softmax attention of 4 heads."""
    return _words(WordConfig(attention="ordinary", head_width=64))


def _gpt(task: GPTConfig, *, adamw_lr: float, sgd_lr: float, steps: int, warmup: int, eval_every: int) -> Configs:
    optimizers = {
        "adahessian": AdaHessian(lr=30 * adamw_lr, block_size=32, weight_decay=0.1 / 30),
        "sgd": SGD(lr=sgd_lr, momentum=0.9),
        "adam": Adam(lr=adamw_lr, betas=(0.9, 0.95)),
        "adamw": AdamW(lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.1),
    }
    schedule = ScheduleConfig(schedule="cosine", lr_warmup_steps=warmup)
    return same_for(with_modern(optimizers), task, schedule=schedule, steps=steps, eval_every=eval_every)


_GPT_NOTES = """
    Not in the paper. AdaHessian's learning rate is 30 times AdamW's, and SGD's was not searched.
    """


@preset(
    "gpt-chars",
    title="character GPT on text files",
    data="train.txt, valid.txt and test.txt, there or in the sub-folder novels.",
    family_notes=_GPT_NOTES,
)
def gpt_chars() -> Configs:
    """A GPT with 0.4 million parameters on the bytes of a text. It trains in about a minute on one CPU core.

    AdamW's learning rate was the best of 3e-3, 1e-2 and 3e-2 on English novels.
    """
    return _gpt(GPTConfig(), adamw_lr=1e-2, sgd_lr=0.3, steps=400, warmup=40, eval_every=50)


@preset(
    "gpt-novels",
    title="GPT with 13 M parameters on text files",
    data="train.txt, valid.txt and test.txt, there or in the sub-folder novels.",
    family_notes=_GPT_NOTES,
)
def gpt_novels() -> Configs:
    """A GPT with 13 million parameters on subwords, which are learned from the training text.

    A run has 2,200 steps of 16 sequences of 256 tokens. AdamW's learning rate is a common one for this size.
    """
    task = GPTConfig(tokens="bpe", vocabulary=8192, layers=6, width=384, heads=6, context=256)
    return _gpt(task, adamw_lr=1e-3, sgd_lr=0.1, steps=2200, warmup=200, eval_every=200)
