"""Every task trains a few steps in its data's real format, and goes on from wherever it was stopped."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_cifar10 import binary, examples
from test_glue_task import SST2_ROWS, write_checkpoint, write_task
from test_image_folder import picture
from test_recommendation_task import row
from test_translation_task import sentences

from adahessian.lab import training
from adahessian.lab.command import main
from adahessian.lab.tasks.registry import EXPERIMENTS


def cifar10(folder: Path) -> None:
    batches = folder / "cifar-10-batches-bin"
    batches.mkdir()
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        (batches / f"{name}.bin").write_bytes(binary(*examples(number)))


def image_folder(folder: Path) -> None:
    for part, count in (("train", 6), ("val", 2)):
        for label in ("cat", "dog"):
            (folder / part / label).mkdir(parents=True)
            for number in range(count):
                picture(number).save(folder / part / label / f"{number}.png")


def parallel_text(folder: Path) -> None:
    for seed, (part, count) in enumerate((("train", 60), ("val", 8), ("test_2016_flickr", 8))):
        rows = sentences(count, seed)
        (folder / f"{part}.de").write_text("".join(" ".join(row) + "\n" for row in rows))
        (folder / f"{part}.en").write_text("".join(" ".join(row[::-1]) + "\n" for row in rows))


def words(folder: Path) -> None:
    drawn = random.Random(0)
    for part, lines in (("train", 60), ("valid", 10), ("test", 10)):
        text = [" ".join(drawn.choices(["the", "cat", "sat", "<unk>", "N", "mat"], k=8)) for _ in range(lines)]
        (folder / f"ptb.{part}.txt").write_text("".join(f" {line} \n" for line in text))


def glue(folder: Path) -> None:
    write_checkpoint(folder / "small")
    write_task(folder, "SST-2", "sentence\tlabel", SST2_ROWS)


def criteo(folder: Path) -> None:
    (folder / "train.txt").write_text("\n".join(map(row, range(70))) + "\n")


SMALL_MODEL = ["--layers", "1", "--width", "16", "--feed-forward", "16"]
TASKS = {
    "digits": (None, []),
    "cifar10-resnet20": (cifar10, ["--batch-size", "4"]),
    "image-folder-resnet18": (image_folder, ["--batch-size", "4", "--image-size", "16", "--workers", "0"]),
    "multi30k-de-en": (
        parallel_text,
        ["--batch-size", "128", *SMALL_MODEL, "--heads", "2", "--vocabulary", "300", "--beam-size", "2"],
    ),
    "ptb-tensorized": (words, ["--batch-size", "4", "--segment", "8", "--head-width", "4", *SMALL_MODEL]),
    "ptb-transformer": (words, ["--batch-size", "4", "--segment", "8", "--head-width", "4", *SMALL_MODEL]),
    "glue-sst2": (glue, ["--model", "small", "--batch-size", "8", "--max-length", "16"]),
    "criteo-dlrm": (criteo, ["--batch-size", "8", "--hash-size", "50"]),
}


def tatoeba(folder: Path) -> None:
    pairs = [f"{' '.join(row[::-1])} .\t{' '.join(row)} .\tsomebody" for row in sentences(200, 0)]
    (folder / "deu.txt").write_text("\n".join(pairs) + "\n")


def wikitext(folder: Path) -> None:
    words(folder)
    for part in ("train", "valid", "test"):
        (folder / f"ptb.{part}.txt").rename(folder / f"wiki.{part}.tokens")


def words_of_many_kinds(folder: Path) -> None:
    """More than the adaptive softmax puts into its first two clusters."""
    many = " ".join(f"w{i}" for i in range(60_100))
    for part in ("train", "valid", "test"):
        (folder / f"wiki.{part}.tokens").write_text(f" <unk> {many if part == 'train' else 'w1 w2 w3 w4'} \n")


def other_glue(name: str, header: str, row: str, dev: tuple[str, ...] = ("dev",)):
    def make(folder: Path) -> None:
        write_checkpoint(folder / "small", squeeze=True)
        write_task(folder, name, header, [row.format(i=i, odd=i % 2) for i in range(24)], dev)

    return make


SMALL_TRANSLATION = ["--batch-size", "128", *SMALL_MODEL, "--heads", "2", "--vocabulary", "300"]
SMALL_LANGUAGE = ["--batch-size", "4", "--segment", "8", "--head-width", "4", *SMALL_MODEL]
SMALL_GLUE = ["--model", "small", "--batch-size", "8", "--max-length", "16"]
PAIR = "index\tsentence1\tsentence2\tlabel"
MORE_TASKS = {
    "cifar10-resnet32": (cifar10, ["--batch-size", "4"]),
    "imagenet-resnet18": (image_folder, ["--batch-size", "4", "--image-size", "32", "--workers", "0"]),
    "iwslt14-de-en": (parallel_text, SMALL_TRANSLATION),
    "wmt14-en-de": (parallel_text, SMALL_TRANSLATION),
    "tatoeba-de-en": (tatoeba, SMALL_TRANSLATION),
    "wikitext2-tensorized": (wikitext, SMALL_LANGUAGE),
    "wikitext103-tensorized": (words_of_many_kinds, SMALL_LANGUAGE),
    "glue-rte": (other_glue("RTE", PAIR, "{i}\ta good {i}\tb bad\tentailment"), SMALL_GLUE),
    "glue-mrpc": (
        other_glue("MRPC", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "{odd}\t0\t0\ta good\tb bad"),
        SMALL_GLUE,
    ),
    "glue-stsb": (other_glue("STS-B", "sentence1\tsentence2\tscore", "a good\tb bad\t{odd}.5"), SMALL_GLUE),
    "glue-qnli": (
        other_glue("QNLI", "index\tquestion\tsentence\tlabel", "{i}\ta good\tb bad\tnot_entailment"),
        SMALL_GLUE,
    ),
    "glue-qqp": (
        other_glue("QQP", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "{i}\t1\t2\ta good\tb\t{odd}"),
        SMALL_GLUE,
    ),
    "glue-mnli": (
        other_glue(
            "MNLI",
            "sentence1\tsentence2\tgold_label",
            "a good\tb bad\tneutral",
            ("dev_matched", "dev_mismatched"),
        ),
        SMALL_GLUE,
    ),
}


def test_no_task_is_left_out():
    assert {*TASKS, *MORE_TASKS} == {*EXPERIMENTS}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stop_after(monkeypatch, steps):
    """As if a signal arrived during a step."""

    class Signal:
        def __init__(self, on_asked):
            self.left = steps

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        @property
        def asked(self):
            self.left -= 1
            return self.left < 0

    monkeypatch.setattr(training, "Interruption", Signal)


def outcome(output: Path) -> tuple[dict, list, dict]:
    (result,) = (json.loads(file.read_text()) for file in output.rglob("*_seed-*.json"))
    (weights,) = (torch.load(file, weights_only=True) for file in output.rglob("weights.pt"))
    epochs = [{key: value for key, value in record.items() if key != "seconds"} for record in result["epochs"]]
    return weights, epochs, result["final"]


@pytest.mark.parametrize("name", TASKS)
def test_every_optimizer_that_has_settings_takes_steps(name, tmp_path):
    make_data, options = TASKS[name]
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    if make_data is not None:
        make_data(data_dir)
    for optimizer in EXPERIMENTS[name].defaults:
        where = ["--data-dir", str(data_dir), "--output", str(tmp_path / optimizer), "--optimizer", optimizer]
        main(["train", name, "--device", "cpu", "--no-compile", "--epochs", "1", *where, *options])
        _, epochs, _ = outcome(tmp_path / optimizer)
        assert epochs[0]["train_loss"] > 0


@pytest.mark.parametrize("name", TASKS)
def test_stopped_in_the_middle_it_ends_in_the_same_bits(name, tmp_path, monkeypatch):
    make_data, options = TASKS[name]
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    if make_data is not None:
        make_data(data_dir)

    def train(output, *more):
        where = ["--data-dir", str(data_dir), "--output", str(tmp_path / output)]
        main(["train", name, "--device", "cpu", "--no-compile", "--epochs", "2", *where, *options, *more])

    train("whole")
    weights, epochs, final = outcome(tmp_path / "whole")
    experiment = EXPERIMENTS[name]
    assert len(epochs) == 2
    assert experiment.curve.name in epochs[0]
    assert experiment.metric.name in final

    with monkeypatch.context() as patch:
        stop_after(patch, epochs[0]["step"] + 1)
        with pytest.raises(SystemExit) as stopped:
            train("stopped")
    assert stopped.value.code == 130
    train("stopped", "--resume")
    again, epochs_again, final_again = outcome(tmp_path / "stopped")
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    assert epochs_again == epochs
    assert final_again == final


@pytest.mark.parametrize("name", MORE_TASKS)
def test_the_others_take_steps(name, tmp_path, capsys):
    make_data, options = MORE_TASKS[name]
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    make_data(data_dir)
    where = ["--data-dir", str(data_dir), "--output", str(tmp_path / "runs"), "--stop-after-steps", "2"]
    main(["train", name, "--device", "cpu", "--no-compile", *where, *options])
    assert "after step 2" in capsys.readouterr().out


def test_two_processes(tmp_path):
    def train(output, *more):
        arguments = ["train", "digits", "--device", "cpu", "--epochs", "2", "--output", str(tmp_path / output), *more]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
        done = subprocess.run(
            [*command, "adahessian", *arguments],
            capture_output=True,
            text=True,
            timeout=900,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = train("whole")
    assert said.count("epoch 2/2") == said.count(".json") == 1, "the first process alone speaks"
    assert len([*(tmp_path / "whole").rglob("events.*")]) == 1, "and writes for TensorBoard"
    train("stopped", "--stop-after-steps", "27")
    train("stopped", "--resume")
    (result,) = (json.loads(file.read_text()) for file in (tmp_path / "whole").rglob("*_seed-*.json"))
    assert result["conditions"]["processes"] == 2
    weights, epochs, final = outcome(tmp_path / "whole")
    again, epochs_again, final_again = outcome(tmp_path / "stopped")
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    assert (epochs_again, final_again) == (epochs, final)
