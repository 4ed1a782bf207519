"""Translation: Transformers on IWSLT14 and WMT14, as in the paper, and on Multi30k."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from adahessian.lab.configs.translation import TranslationConfig
from adahessian.lab.data.parallel_text import Pairs, read_folder
from adahessian.lab.data.subwords import WORDS, WORDS_AND_PUNCTUATION, learn_bpe
from adahessian.lab.data.token_batches import PADDING, PairBatch, Sentences, TokenBatches
from adahessian.lab.errors import ConfigError
from adahessian.lab.models.transformer import Decoding, Transformer, beam_search
from adahessian.lab.tasks.task import Env, Task, to_device

# Maximum number of tokens per batch in evaluation, which bounds memory.
_EVALUATED_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """How to read a text, and how to compare its translations."""

    languages: tuple[str, str]  # of the sentences, and of their translations
    tokenized: bool = False  # Moses put spaces between words and punctuation
    lowercase: bool = False  # BLEU ignores case


CORPORA = {
    "iwslt14": Corpus(languages=("de", "en"), tokenized=True, lowercase=True),
    "wmt14": Corpus(languages=("en", "de"), tokenized=True),
    "multi30k": Corpus(languages=("de", "en")),
}


class TranslationTask(Task[PairBatch]):
    """Training on sentence pairs, validation by their loss, and a test by BLEU."""

    def __init__(self, config: TranslationConfig, env: Env) -> None:
        self.config, self.env, self.corpus = config, env, CORPORA[config.corpus]
        folder = env.data_dir / config.corpus
        folder = folder if folder.is_dir() else env.data_dir
        training, validation, test = read_folder(folder, *self.corpus.languages)
        words = WORDS if self.corpus.tokenized else WORDS_AND_PUNCTUATION
        self.subwords = learn_bpe([*training[0], *training[1]], config.vocabulary, words)
        self.training = TokenBatches(*self._encode(training, config.max_sentence), config.batch_size, env)
        self.validation = TokenBatches(*self._encode(validation), _EVALUATED_TOKENS)
        self.test, self.references = TokenBatches(*self._encode(test), _EVALUATED_TOKENS), test[1]
        self.steps_per_epoch = len(self.training)
        if not len(self.training):
            options = f"--max-sentence {config.max_sentence} and --batch-size {config.batch_size}"
            raise ConfigError(f"{options} leave none of {len(training[0]):,} training pairs. Increase one of them.")

    def build_model(self) -> Transformer:
        return Transformer(self.subwords.get_vocab_size(), self.config).to(self.env.device)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[PairBatch]:
        return (to_device(batch, self.env.device) for batch in self.training.epoch(epoch, skip))

    def loss(self, model: nn.Module, batch: PairBatch) -> Tensor:
        """Return the cross entropy with smoothed labels, the mean over all tokens except padding."""
        return _token_loss(model, batch, label_smoothing=self.config.label_smoothing)

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        """Return loss (nats per token, without label smoothing) and perplexity. BLEU is part of the final test."""
        metrics = self._losses(model, "valid", self.validation)
        if final:
            metrics |= bleu(self.translate(model), self.references, self.corpus)
            metrics |= self._losses(model, "test", self.test)
        return metrics

    def translate(self, model: nn.Module) -> list[str]:
        """Translate the test text by beam search."""
        config, translations = self.config, [""] * len(self.references)
        for indices, batch in self.test.in_order():
            source = batch[0].to(self.env.device)
            # Long enough for any correct translation, and an end to endless ones.
            limits = 2 * (source != PADDING).sum(1) + 10
            decoding = Decoding(cast(Transformer, model), source)
            sentences = beam_search(decoding, limits, beam_size=config.beam_size, length_penalty=config.length_penalty)
            for index, translation in zip(indices.tolist(), self.subwords.decode_batch(sentences), strict=True):
                translations[index] = " ".join(translation.split())
        return translations

    def _losses(self, model: nn.Module, part: str, batches: TokenBatches) -> dict[str, float]:
        total, tokens = torch.zeros((), device=self.env.device), 0
        for _, batch in batches.in_order():
            count = int((batch[2] != PADDING).sum())
            total += count * _token_loss(model, to_device(batch, self.env.device))
            tokens += count
        loss = total.item() / tokens
        return {f"{part}_loss": loss, f"{part}_perplexity": math.exp(loss) if loss < 700 else math.inf}

    def _encode(self, pairs: Pairs, longest: float = math.inf) -> tuple[Sentences, Sentences]:
        sides = ([encoding.ids for encoding in self.subwords.encode_batch_fast(side)] for side in pairs)
        kept = [pair for pair in zip(*sides, strict=True) if max(map(len, pair)) <= longest]
        return Sentences([source for source, _ in kept]), Sentences([target for _, target in kept])


def _token_loss(model: nn.Module, batch: PairBatch, label_smoothing: float = 0.0) -> Tensor:
    source, read, target = batch
    logits = model(source, read).flatten(0, 1)
    return F.cross_entropy(logits, target.flatten(), ignore_index=PADDING, label_smoothing=label_smoothing)


def bleu(hypotheses: Sequence[str], references: Sequence[str], corpus: Corpus) -> dict[str, float]:
    """Return BLEU on words and on plain text, in percent.

    ``bleu`` compares words between spaces, as the paper's multi-bleu script does. ``bleu_detokenized`` is sacrebleu's
    score of plain text. They are the same number for text that Moses did not tokenize.
    """
    from sacrebleu import corpus_bleu
    from sacremoses import MosesDetokenizer

    def score(hypotheses: Sequence[str], references: Sequence[str], tokenize: str) -> float:
        # force: no warning about tokenized text.
        return corpus_bleu(hypotheses, [references], tokenize=tokenize, lowercase=corpus.lowercase, force=True).score

    if not corpus.tokenized:
        return dict.fromkeys(("bleu", "bleu_detokenized"), score(hypotheses, references, "13a"))
    detokenize = MosesDetokenizer(corpus.languages[1]).detokenize
    plain, plain_references = ([detokenize(text.split()) for text in texts] for texts in (hypotheses, references))
    return {"bleu": score(hypotheses, references, "none"), "bleu_detokenized": score(plain, plain_references, "13a")}
