"""AdaHessian in the Trainer of transformers: a small Llama learns to write a module of the standard library.

On one device, or on two GPUs::

    pip install "adahessian[transformers]"
    python transformers_text.py
    torchrun --nproc-per-node 2 transformers_text.py
"""

import argparse
import inspect
import tempfile
import textwrap

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from adahessian.integrations.transformers import AdaHessianTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps

# Letters are the words of this language, and lines of 64 of them its sentences.
text = inspect.getsource(textwrap)
letters = sorted(set(text))
words = torch.tensor([letters.index(letter) for letter in text])
lines = words[: len(words) // 64 * 64].view(-1, 64)
examples = [{"input_ids": line, "labels": line} for line in lines]

set_seed(0)
config = LlamaConfig(
    vocab_size=len(letters),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    attn_implementation="sdpa",
)
with tempfile.TemporaryDirectory() as folder:
    trainer = AdaHessianTrainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            folder,
            max_steps=steps,
            learning_rate=0.15,
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
        # Curvature at each of the first steps, then at every fifth.
        adahessian_settings={"block_size": 32, "eps": 1e-3, "update_every": 5, "warmup_steps": 20},
    )
    trainer.train()
    print(f"loss on lines it has not seen: {trainer.evaluate()['eval_loss']:.3f}")
