"""Translation: the paper's Transformers on IWSLT14 and WMT14, and a small one on Multi30k."""

from typing import ClassVar, Literal

from adahessian.lab.configs.checks import BelowOne, Count
from adahessian.lab.configs.optimizers import SGD, Adagrad, AdaHessian, Adam, AdamW, RMSprop
from adahessian.lab.configs.presets import Configs, preset, same_for, with_modern
from adahessian.lab.configs.run import VALID_LOSS, Metric, ScheduleConfig, WithValidation


class TranslationConfig(WithValidation):
    """Translation with a Transformer."""

    metric: ClassVar[Metric] = Metric(name="bleu", title="BLEU")
    validation_metric: ClassVar[Metric] = VALID_LOSS

    batch_size: Count = 4096  # Tokens per batch, over all processes.
    corpus: Literal["iwslt14", "wmt14", "multi30k"] = "iwslt14"  # Training text.
    layers: Count = 6  # Layers of the encoder, and of the decoder.
    width: Count = 512  # Size of an embedding.
    feed_forward: Count = 1024  # Hidden units of a feed-forward network.
    heads: Count = 4  # Attention heads per layer.
    vocabulary: Count = 10_000  # Subwords of both languages together.
    max_sentence: Count = 175  # Maximum tokens of a training sentence. Longer pairs are left out.
    dropout: BelowOne = 0.3  # Dropout of activations.
    attention_dropout: BelowOne = 0.1  # Dropout of attention weights.
    activation_dropout: BelowOne = 0.1  # Dropout of the feed-forward networks' hidden units.
    label_smoothing: BelowOne = 0.1  # Share of the target's probability that is spread over all tokens.
    beam_size: Count = 5  # Hypotheses of the beam search.
    length_penalty: float = 1.0  # The beam search divides a score by the length to this power.


def _configs(
    task: TranslationConfig, *, warmup: int, lr: float = 0.047, eps: float = 2.8e-8, adamw: float = 1.5e-3, **run: int
) -> Configs:
    betas = (0.9, 0.98)
    optimizers = {
        "adahessian": AdaHessian(lr=lr, eps=eps, block_size=32, weight_decay=1e-4, betas=betas),
        "adamw": AdamW(lr=adamw, weight_decay=1e-4, betas=betas),
        "adam": Adam(lr=5e-4, betas=betas),
        "sgd": SGD(lr=0.1, momentum=0.9),
        "adagrad": Adagrad(lr=1e-2, eps=1e-10),
        "rmsprop": RMSprop(lr=3e-4, alpha=0.98),
    }
    schedule = ScheduleConfig(schedule="inverse-sqrt", lr_warmup_steps=warmup)
    return same_for(with_modern(optimizers), task, schedule=schedule, final_weights="average", **run)


_NOTES = """
    The learning rates of SGD, Adam, Adagrad and RMSprop are ours and were not searched. They have no weight decay.
    """
_IWSLT14 = "train, valid, test (.de and .en): lower-case words, split by Moses. In --data-dir or its subfolder iwslt14."
_WMT14 = (
    "train, valid, test (or newstest2013, newstest2014), .en and .de: words, split by Moses. In --data-dir or wmt14."
)
_MULTI30K = "Raw captions: train, val, test_2016_flickr, each .de and .en. In --data-dir or its subfolder multi30k."


@preset("iwslt14-de-en", "Transformer on IWSLT14, German to English", _IWSLT14, _NOTES)
def iwslt14_de_en() -> Configs:
    """AdaHessian's eps of 2.8e-8 for the mean loss per token equals 1e-4 for the authors' sum over some 3,600 tokens.

    Dropout follows the authors' scripts. The paper's appendix says 0.

    bleu compares words and ignores case, like the paper's multi-bleu script. bleu_detokenized compares plain text.
    """
    return _configs(TranslationConfig(), epochs=55, average_epochs=5, warmup=8000)


@preset("wmt14-en-de", "Transformer on WMT14, English to German", _WMT14, _NOTES)
def wmt14_en_de() -> Configs:
    """AdaHessian's learning rate, block size and betas are from the paper, and so is the dropout of 0.

    AdaHessian's eps, the warm-up, the weight decays and AdamW's learning rate are ours.

    bleu compares words with case, like the paper's multi-bleu script. bleu_detokenized compares plain text.
    """
    task = TranslationConfig(
        corpus="wmt14",
        batch_size=8 * 4096,
        feed_forward=2048,
        heads=8,
        vocabulary=37_000,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        beam_size=4,
        length_penalty=0.6,
    )
    return _configs(task, epochs=130, average_epochs=10, warmup=8000, lr=1.0, eps=3.5e-9, adamw=1e-3)


@preset("multi30k-de-en", "small Transformer on Multi30k, German to English", _MULTI30K, _NOTES)
def multi30k_de_en() -> Configs:
    """Not in the paper. Captions of images: 29,000 pairs of short sentences.

    Sizes, epochs and warm-up are ours. The rest is as in iwslt14-de-en. bleu and bleu_detokenized are the same score:
    sacrebleu's, with case.
    """
    task = TranslationConfig(corpus="multi30k", layers=3, width=256, feed_forward=512, vocabulary=8000)
    return _configs(task, epochs=20, average_epochs=5, warmup=500)
