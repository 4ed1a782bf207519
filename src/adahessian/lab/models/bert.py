"""Pre-trained BERT and SqueezeBERT with a new head, and their tokenizers, from local folders."""

from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from adahessian.lab.errors import DataError


def load_tokenizer(folder: Path, max_length: int) -> Any:
    """Return the tokenizer of a checkpoint, a ``transformers.PreTrainedTokenizerFast``, if it suits the model."""
    config = _load_config(folder)
    # Without a vocabulary, transformers returns a tokenizer that knows no words.
    if not any((folder / name).is_file() for name in ("vocab.txt", "tokenizer.json")):
        raise DataError(f"{folder} has neither vocab.txt nor tokenizer.json. Add the files of the checkpoint.")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise DataError(f"{folder} has a damaged vocabulary ({error}). Fetch the checkpoint again.") from error
    if len(tokenizer) > config.vocab_size:
        problem = f"{folder} has {len(tokenizer)} tokens in its vocabulary and {config.vocab_size} in config.json"
        raise DataError(f"{problem}. Use both from the same checkpoint.")
    if max_length > (longest := config.max_position_embeddings):
        raise DataError(f"{folder} has a model of at most {longest} tokens. Pass --max-length {longest} or less.")
    return tokenizer


def load_classifier(folder: Path, outputs: int, dropout: float) -> nn.Module:
    """Return a pre-trained encoder in float32 with a new head, which is drawn from torch's random state.

    The folder has ``config.json``, and safetensors (float16 ones too) or ``pytorch_model.bin``. Attention is eager,
    because fused attention cannot be differentiated twice.
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
        raise DataError(f"{folder} has no readable weights ({error}). Fetch them again.") from error
    suspects = [*report["missing_keys"], *report["unexpected_keys"], *(key for key, *_ in report["mismatched_keys"])]
    names = {name.removeprefix(f"{model.base_model_prefix}.") for name in suspects}
    if misfits := sorted(name for name in names if name.startswith(("embeddings.", "encoder."))):
        problem = f"{folder} has weights that do not fit its config.json: {', '.join(misfits[:5])}"
        raise DataError(f"{problem}. Use both from the same checkpoint.")
    for layer in model.classifier.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=config.initializer_range)
            nn.init.zeros_(layer.bias)
    return cast(nn.Module, model)


def _load_config(folder: Path) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        problem = f"{folder} has no config.json that transformers recognizes ({error})"
        raise DataError(f"{problem}. Add the files of the checkpoint.") from error
