"""Data sets that are as small as they can be, in their owners' real formats.

Every function writes one into an empty folder, the same bytes each time. Digits come with a package.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image


def write_cifar10(folder: Path) -> None:
    """The six files of the binary form, of three images each."""
    batches = folder / "cifar-10-batches-bin"
    batches.mkdir()
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        images, labels = cifar10_examples(seed)
        (batches / f"{name}.bin").write_bytes(cifar10_binary(images, labels))


def cifar10_examples(seed: int, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (rows, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return images, torch.randint(10, (rows,), generator=generator)


def cifar10_binary(images: torch.Tensor, labels: torch.Tensor) -> bytes:
    """As in the binary form: for each image its label in a byte, and its pixels."""
    return torch.cat((labels.to(torch.uint8)[:, None], images.flatten(1)), 1).numpy().tobytes()


def write_image_folder(folder: Path) -> None:
    """Two classes, with six images each to train on and two to validate on."""
    for part, count in (("train", 6), ("val", 2)):
        for label in ("cat", "dog"):
            (folder / part / label).mkdir(parents=True)
            for number in range(count):
                picture(number).save(folder / part / label / f"{number}.png")


def picture(seed: int, size: tuple[int, int] = (20, 16), mode: str = "RGB") -> Image.Image:
    """An image of noise."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


GERMAN = ("ein", "zwei", "drei", "vier", "fünf", "sechs")


def write_multi30k(folder: Path) -> None:
    """A file for each part and language, with a sentence a line. The English ones are the German ones backwards.

    IWSLT and WMT are in the same form.
    """
    for seed, (part, count) in enumerate((("train", 60), ("val", 8), ("test_2016_flickr", 8))):
        rows = german_sentences(count, seed)
        (folder / f"{part}.de").write_text("".join(" ".join(row) + "\n" for row in rows))
        (folder / f"{part}.en").write_text("".join(" ".join(row[::-1]) + "\n" for row in rows))


def german_sentences(count: int, seed: int) -> list[list[str]]:
    """Sentences of two words to thirteen."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [GERMAN[word] for word in torch.randint(len(GERMAN), (int(length),), generator=generator)]
        for length in torch.randint(2, 14, (count,), generator=generator)
    ]


def _write_text(name: str, words: str, line: str, folder: Path) -> None:
    """A file for each part, with lines of eight words."""
    drawn = random.Random(0)
    for part, lines in (("train", 60), ("valid", 10), ("test", 10)):
        text = [line.format(" ".join(drawn.choices(words.split(), k=8))) for _ in range(lines)]
        (folder / name.format(part)).write_text("".join(text))


write_ptb = partial(_write_text, "ptb.{}.txt", "the cat sat <unk> N mat", " {} \n")
write_novels = partial(_write_text, "{}.txt", "the sea was calm, Zoë said", "{}.\n")


def write_wikitext103(folder: Path) -> None:
    """WikiText with more kinds of words than the adaptive softmax puts into its first two clusters."""
    many = " ".join(f"w{i}" for i in range(60_100))
    for part in ("train", "valid", "test"):
        (folder / f"wiki.{part}.tokens").write_text(f" <unk> {many if part == 'train' else 'w1 w2 w3 w4'} \n")


GLUE_WORDS = ("a", "b", "c", "d", "e", "f", "g", "h", "good", "bad", "fine", "poor")


def write_sst2(folder: Path) -> None:
    """SST-2, whose label is how its second word judges; and a BERT."""
    words = (GLUE_WORDS * 4)[:45]
    rows = [f"{word} {'good' if n % 2 else 'bad'} {'a ' * (n % 7)}\t{n % 2}" for n, word in enumerate(words)]
    write_checkpoint(folder / "small")
    write_glue_files(folder, "SST-2", "sentence\tlabel", rows)


def _write_alike(form: str, header: str, row: str, dev: Sequence[str], folder: Path) -> None:
    """A data set with rows that are almost the same, and a SqueezeBERT."""
    write_checkpoint(folder / "small", squeeze=True)
    write_glue_files(folder, form, header, [row.format(i=i, odd=i % 2) for i in range(24)], dev)


_PAIR, _DEV = "sentence1\tsentence2", ("dev",)
_ALIKE = {
    "glue-rte": ("RTE", f"index\t{_PAIR}\tlabel", "{i}\ta good {i}\tb bad\tentailment", _DEV),
    "glue-mrpc": ("MRPC", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "{odd}\t0\t0\ta good\tb bad", _DEV),
    "glue-stsb": ("STS-B", f"{_PAIR}\tscore", "a good\tb bad\t{odd}.5", _DEV),
    "glue-qnli": ("QNLI", "index\tquestion\tsentence\tlabel", "{i}\ta good\tb bad\tnot_entailment", _DEV),
    "glue-qqp": ("QQP", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "{i}\t1\t2\ta good\tb\t{odd}", _DEV),
    "glue-mnli": ("MNLI", f"{_PAIR}\tgold_label", "a good\tb bad\tneutral", ("dev_matched", "dev_mismatched")),
}


def write_stsb(folder: Path) -> None:
    """STS-B, and a SqueezeBERT."""
    _write_alike(*_ALIKE["glue-stsb"], folder)


def write_glue_files(folder: Path, form: str, header: str, rows: Sequence[str], dev: Sequence[str] = ("dev",)) -> None:
    """A data set of GLUE, with the same rows in each of its files."""
    (folder / "glue" / form).mkdir(parents=True)
    for name in ("train", *dev):
        (folder / "glue" / form / f"{name}.tsv").write_text("\n".join([header, *rows]) + "\n")


def write_checkpoint(folder: Path, *, squeeze: bool = False) -> None:
    """A pre-trained model in float16, with its words."""
    # Slow to import, and needed here alone.
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel, SqueezeBertConfig, SqueezeBertModel

    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *GLUE_WORDS]))
    config_type, model_type = (SqueezeBertConfig, SqueezeBertModel) if squeeze else (BertConfig, BertModel)
    sizes = {"vocab_size": 20, "hidden_size": 8, "embedding_size": 8, "intermediate_size": 16}
    config = config_type(**sizes, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        encoder = model_type(config)
        for param in encoder.parameters():
            torch.nn.init.normal_(param, std=0.5)
    config.save_pretrained(folder)
    save_file({name: weight.half() for name, weight in encoder.state_dict().items()}, folder / "model.fp16.safetensors")


def write_criteo(folder: Path) -> None:
    """Seventy rows: a click or none, 13 numbers and 26 categories."""
    (folder / "train.txt").write_text("\n".join(map(criteo_row, range(70))) + "\n")


def criteo_row(number: int) -> str:
    """A row whose first number is its own, with a click where its first category is odd."""
    generator = torch.Generator().manual_seed(number)
    categories = torch.randint(1 << 20, (26,), generator=generator).tolist()
    numbers = [number, *torch.randint(50, (12,), generator=generator).tolist()]
    return "\t".join([str(categories[0] % 2), *map(str, numbers), *(f"{category:08x}" for category in categories)])


# For each task what writes its data, if that does not come with a package.
WRITERS: dict[str, Callable[[Path], None] | None] = {
    **dict.fromkeys(("digits", "digits-mlp", "pinn-poisson-1d", "pinn-poisson-2d")),
    **dict.fromkeys(("cifar10-resnet20", "cifar10-resnet32"), write_cifar10),
    **dict.fromkeys(("image-folder-resnet18", "imagenet-resnet18"), write_image_folder),
    **dict.fromkeys(("multi30k-de-en", "iwslt14-de-en", "wmt14-en-de"), write_multi30k),
    **dict.fromkeys(["ptb-tensorized", "ptb-transformer"], write_ptb),
    "wikitext103-tensorized": write_wikitext103,
    **dict.fromkeys(("gpt-chars", "gpt-novels"), write_novels),
    **dict.fromkeys(("glue-sst2", "minilm-sst2"), write_sst2),
    **{name: partial(_write_alike, *details) for name, details in _ALIKE.items()},
    "glue-stsb": write_stsb,
    "criteo-dlrm": write_criteo,
}
