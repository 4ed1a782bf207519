"""A pre-trained BERT or SqueezeBERT with a new linear head, from a folder with its configuration and weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from adahessian.lab.data.errors import DataError


class SentenceClassifier(nn.Module):
    """A pre-trained encoder with a new classifier, which comes from torch's random stream.

    Attention is the plain one, which can be differentiated twice.

    Args:
        folder: The checkpoint: ``config.json`` and ``*.safetensors``, or else ``pytorch_model.bin``.
        outputs: Number of classes, or 1 for a score.
        dropout: Share of activations that are dropped, in the encoder and before the classifier.

    Raises:
        DataError: If the checkpoint is missing, or does not fit its configuration.
    """

    def __init__(self, folder: Path, outputs: int, dropout: float = 0.1) -> None:
        super().__init__()
        config = read_config(folder)
        config.num_labels = outputs
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = config.classifier_dropout = dropout
        untyped: Any = AutoModelForSequenceClassification
        self.transformer: nn.Module = untyped.from_config(config, attn_implementation="eager", dtype=torch.float32)
        _load_encoder(self.transformer, folder)

    def forward(self, tokens: Tensor, types: Tensor, mask: Tensor) -> Tensor:
        """Token numbers, the sentence each belongs to, and which are no padding, to logits of shape (N, outputs)."""
        logits: Tensor = self.transformer(input_ids=tokens, token_type_ids=types, attention_mask=mask).logits
        return logits


def read_config(folder: Path) -> Any:
    """The configuration of a checkpoint, a ``transformers.PretrainedConfig``.

    Raises:
        DataError: If it is missing, or not that of a model that transformers has.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise DataError(f"{path} is missing: give the folder of a checkpoint with config.json, vocab.txt and weights")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} does not describe a model that transformers has ({error})") from error


def _load_encoder(model: Any, folder: Path) -> None:
    """Load what a checkpoint has for the encoder, by name, with or without the encoder's prefix."""
    encoder: nn.Module = model.base_model
    saved = _read_weights(folder)
    prefix = f"{model.base_model_prefix}."
    if any(name.startswith(prefix) for name in saved):
        # What has no prefix then belongs to a head, of pre-training or of another task.
        saved = {name.removeprefix(prefix): weight for name, weight in saved.items() if name.startswith(prefix)}
    # Position numbers, which older versions of transformers saved.
    buffers = {name for name, _ in encoder.named_buffers()}
    saved = {_new_name(name): weight.float() for name, weight in saved.items() if name not in buffers}
    try:
        missing, unexpected = encoder.load_state_dict(saved, strict=False)
    except RuntimeError as error:
        raise DataError(f"{folder}: the weights do not fit config.json ({error})") from error
    # Some checkpoints have no pooler, which is a part of the head: it is new then.
    missing = [name for name in missing if not name.startswith("pooler.")]
    if missing or unexpected:
        raise DataError(
            f"{folder}: the weights do not fit config.json. Missing: {_some(missing)}. Unexpected: {_some(unexpected)}"
        )


def _read_weights(folder: Path) -> Mapping[str, Tensor]:
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model.bin"))
    if not files:
        raise DataError(f"{folder} has no weights: put the checkpoint's *.safetensors or pytorch_model.bin there")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            if file.suffix == ".safetensors":
                weights.update(load_file(file))
            else:
                weights.update(torch.load(file, map_location="cpu", weights_only=True))
        except (OSError, SafetensorError, UnpicklingError, RuntimeError, EOFError) as error:
            raise DataError(f"{file} cannot be read ({error}): download it again") from error
    return weights


def _new_name(name: str) -> str:
    """The name of a weight today: the first BERTs had other names in their layer norms."""
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5]) or "none"
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
