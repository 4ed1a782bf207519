"""Language modelling: the paper's Transformers on Penn Treebank and WikiText, and GPTs on text files."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from adahessian.lab.configs.checks import BelowOne, Count, minimum
from adahessian.lab.configs.optimizers import SGD, Adagrad, AdaHessian, Adam, AdamW, RMSprop
from adahessian.lab.configs.presets import Configs, preset, same_for, with_modern
from adahessian.lab.configs.run import VALID_LOSS, Metric, ScheduleConfig, WithValidation
from adahessian.lab.errors import ConfigError


class WordConfig(WithValidation):
    """Prediction of words with a Transformer, as in the paper."""

    metric: ClassVar[Metric] = Metric(name="test_perplexity", title="test perplexity", higher_is_better=False)
    validation_metric: ClassVar[Metric] = replace(metric, name="valid_perplexity", title="validation perplexity")

    batch_size: Count = 60  # Segments per batch, over all processes.
    text: Literal["ptb", "wikitext103"] = "ptb"  # Training text.
    attention: Literal["tensorized", "ordinary"] = "tensorized"  # Multi-linear attention, or softmax attention.
    layers: Count = 3  # Layers.
    width: Count = 256  # Size of a word's embedding.
    head_width: Count = 40  # Size of an attention head. Tensorized attention has one head.
    feed_forward: Count = 2100  # Hidden units of a feed-forward network.
    segment: Count = 32  # Words per segment. Segments do not see each other.
    dropout: BelowOne = 0.3  # Dropout of activations.
    label_smoothing: BelowOne = 0.1  # Share of the target's probability that is spread over all words.
    softmax: Literal["full", "adaptive"] = "full"  # All words with tied embeddings, or clusters of rarer words.


class GPTConfig(WithValidation):
    """Prediction of characters or subwords with a GPT."""

    metric: ClassVar[Metric] = replace(VALID_LOSS, name="test_loss", title="test loss, nats per token")
    validation_metric: ClassVar[Metric] = VALID_LOSS

    batch_size: Count = 16  # Sequences per batch, over all processes.
    tokens: Literal["bytes", "bpe"] = "bytes"  # Bytes, or subwords that are learned from the training text.
    vocabulary: Annotated[int, minimum(256)] = 256  # Number of different tokens. Bytes need 256.
    layers: Count = 2  # Layers.
    width: Count = 128  # Size of an embedding.
    heads: Count = 4  # Attention heads per layer.
    context: Annotated[int, minimum(2)] = 128  # Tokens per sequence.
    dropout: BelowOne = 0.0  # Dropout of activations.

    def __post_init__(self) -> None:
        super().__post_init__()
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
    The published code never applies its mask, so words see the words they predict. This implementation is causal.
    Do not compare it with the paper's perplexities.

    train_perplexity is measured with the tested weights. The training loss includes dropout and label smoothing.

    The schedule after the warm-up is ours, because the paper does not give it. So are the learning rates of SGD (the
    best of three for a small network), Adam, Adagrad and RMSprop (not searched).
    """
_PTB = "ptb.train.txt, ptb.valid.txt and ptb.test.txt, as Mikolov prepared them, in --data-dir or its subfolder ptb."
_WIKITEXT = "wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, in --data-dir or its subfolder wikitext-103."


@preset("ptb-tensorized", "tensorized transformer on Penn Treebank", _PTB, _NOTES)
def ptb_tensorized() -> Configs:
    """Embeddings are tied to the softmax. AdamW's learning rate is that of the tensorized transformer's scripts."""
    return _words(WordConfig())


@preset("ptb-transformer", "ordinary Transformer on Penn Treebank", _PTB, _NOTES)
def ptb_transformer() -> Configs:
    """Not in the paper: ptb-tensorized with softmax attention of 4 heads."""
    return _words(WordConfig(attention="ordinary", head_width=64))


@preset("wikitext103-tensorized", "tensorized transformer on WikiText-103", _WIKITEXT, _NOTES)
def wikitext103_tensorized() -> Configs:
    """The softmax is adaptive, and embeddings are not tied. A batch has 10 GB of logits."""
    task = WordConfig(text="wikitext103", batch_size=120, layers=6, segment=80, softmax="adaptive")
    return _words(task, adahessian_lr=1.0)


def _gpt(task: GPTConfig, *, adamw_lr: float, sgd_lr: float, steps: int, warmup: int, eval_every: int) -> Configs:
    optimizers = {
        "adahessian": AdaHessian(lr=30 * adamw_lr, block_size=32, weight_decay=0.1 / 30),
        "sgd": SGD(lr=sgd_lr, momentum=0.9),
        "adam": Adam(lr=adamw_lr, betas=(0.9, 0.95)),
        "adamw": AdamW(lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.1),
    }
    schedule = ScheduleConfig(schedule="cosine", lr_warmup_steps=warmup)
    return same_for(with_modern(optimizers), task, schedule=schedule, steps=steps, eval_every=eval_every)


_GPT_NOTES = "Not in the paper. AdaHessian's learning rate is 30 times AdamW's, and SGD's was not searched."
_TEXT = "train.txt, valid.txt and test.txt, in --data-dir or its subfolder novels."


@preset("gpt-chars", "character GPT on text files", _TEXT, _GPT_NOTES)
def gpt_chars() -> Configs:
    """It trains in a minute on one CPU core. AdamW is better at 1e-3, as RESULTS.md shows."""
    return _gpt(GPTConfig(), adamw_lr=1e-2, sgd_lr=0.3, steps=400, warmup=40, eval_every=50)


@preset("gpt-novels", "GPT with 13 M parameters on text files", _TEXT, _GPT_NOTES)
def gpt_novels() -> Configs:
    """Subwords are learned from the training text. AdamW's learning rate is a common one for this size."""
    task = GPTConfig(tokens="bpe", vocabulary=8192, layers=6, width=384, heads=6, context=256)
    return _gpt(task, adamw_lr=1e-3, sgd_lr=0.1, steps=2200, warmup=200, eval_every=200)
