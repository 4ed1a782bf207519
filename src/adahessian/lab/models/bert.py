"""Pre-trained BERT and SqueezeBERT with a new head, and their tokenizers, from local folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from adahessian.lab.errors import DataError

_VOCABULARIES = ("vocab.txt", "tokenizer.json")


def load_tokenizer(folder: Path, max_length: int) -> Any:
    """Return the tokenizer of a checkpoint, a ``transformers.PreTrainedTokenizerFast``.

    Raises:
        DataError: If it is missing or damaged, or its tokens or ``max_length`` exceed what the model was built for.
    """
    config = _load_config(folder)
    # Without a vocabulary, transformers returns a tokenizer that knows no words.
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise DataError(f"{folder} has neither vocab.txt nor tokenizer.json. Add the files of the checkpoint.")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise DataError(f"{folder} has a damaged vocabulary or tokenizer_config.json ({error}).") from error
    if len(tokenizer) > config.vocab_size:
        raise DataError(
            f"{folder} has a vocabulary of {len(tokenizer)} tokens, and config.json says {config.vocab_size}. "
            "Take both from one checkpoint."
        )
    if max_length > config.max_position_embeddings:
        raise DataError(
            f"{folder} reads at most {config.max_position_embeddings} tokens. Pass --max-length "
            f"{config.max_position_embeddings} or less."
        )
    return tokenizer


def load_classifier(folder: Path, outputs: int, dropout: float) -> nn.Module:
    """Return a pre-trained encoder in float32 with a new head, which is drawn from torch's random state.

    Attention is eager, because fused attention cannot be differentiated twice.

    Args:
        folder: The checkpoint: ``config.json`` and safetensors (float16 ones too) or ``pytorch_model.bin``.
        outputs: Number of classes, or 1 for a score.
        dropout: Dropout in the encoder and before the head.

    Raises:
        DataError: If the checkpoint is missing, damaged, or does not fit its ``config.json``.
    """
    config = _load_config(folder)
    config.num_labels = outputs
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = config.classifier_dropout = dropout
    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            folder,
            config=config,
            attn_implementation="eager",
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            output_loading_info=True,
            variant="fp16" if any(folder.glob("*.fp16.*")) else None,
        )
    except Exception as error:  # safetensors and pickle raise their own
        raise DataError(f"{folder} has no weights that can be read ({error}). Fetch them again.") from error
    if misfits := sorted(_misfits(model.base_model_prefix, report)):
        raise DataError(f"{folder} has weights that do not fit its config.json: {', '.join(misfits[:5])}.")
    for layer in model.classifier.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=config.initializer_range)
            nn.init.zeros_(layer.bias)
    classifier: nn.Module = model
    return classifier


def _load_config(folder: Path) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder} has no config.json of a model that transformers knows ({error}).") from error


def _misfits(prefix: str, report: dict[str, Any]) -> set[str]:
    """Return the parameters of the encoder that are missing, have another shape, or are too many."""
    wrong_shape = {entry[0] for entry in report["mismatched_keys"]}
    names = {
        name.removeprefix(f"{prefix}.") for name in {*report["missing_keys"], *report["unexpected_keys"], *wrong_shape}
    }
    return {name for name in names if name.startswith(("embeddings.", "encoder."))}
