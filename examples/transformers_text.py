"""Train a small Llama on the source code of a Python module with the transformers Trainer.

Run it on one device or on two GPUs::

    pip install "adahessian[transformers]"
    python transformers_text.py
    torchrun --nproc-per-node 2 transformers_text.py
"""

import argparse
import inspect
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from adahessian.integrations.transformers import optimizer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps

# The tokens are characters. Each example is 64 characters long.
text = inspect.getsource(argparse)
characters = sorted(set(text))
tokens = torch.tensor([characters.index(character) for character in text])
chunks = tokens[: len(tokens) // 64 * 64].view(-1, 64)
examples = [{"input_ids": chunk, "labels": chunk} for chunk in chunks]

set_seed(0)
config = LlamaConfig(
    vocab_size=len(characters),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    attn_implementation="sdpa",
)
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            folder,
            max_steps=steps,
            learning_rate=3e-3,  # the same as for AdamW
            warmup_steps=steps // 10,
            weight_decay=0.01,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            logging_steps=20,
            eval_strategy="steps",
            eval_steps=100,
            save_steps=100,
            report_to="none",
        ),
        train_dataset=examples[:-32],
        eval_dataset=examples[-32:],
        optimizer_cls_and_kwargs=optimizer(),  # the one new line
    )
    trainer.train()
    print(f"validation loss: {trainer.evaluate()['eval_loss']:.3f}")
