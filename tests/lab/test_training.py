"""The trainer: every task by one loop, stopped anywhere and continued to the same bits."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adahessian.lab.checkpoints import load_checkpoint, save_checkpoint
from adahessian.lab.command import main
from adahessian.lab.runs import find_results
from adahessian.lab.settings import economized
from adahessian.lab.tasks.registry import EXPERIMENTS
from adahessian.lab.train import parse_train

SHORT = ["--epochs", "2", "--device", "cpu", "--no-compile"]


def result_of(output: Path) -> dict:
    (file,) = output.rglob("*_seed-*.json")
    return json.loads(file.read_text())


def weights_of(output: Path) -> dict[str, torch.Tensor]:
    (file,) = output.rglob("weights.pt")
    return torch.load(file, weights_only=True)


def without_times(result: dict) -> list[dict]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in result["epochs"]]


def assert_same_run(one: Path, other: Path) -> None:
    first, second = weights_of(one), weights_of(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert without_times(result_of(one)) == without_times(result_of(other))
    assert result_of(one)["final"] == result_of(other)["final"]


@pytest.mark.parametrize("optimizer", ["adahessian", "sgd", "adam", "adamw", "adagrad", "rmsprop"])
def test_every_optimizer_trains_digits(tmp_path, optimizer):
    main(["train", "digits", "--optimizer", optimizer, *SHORT, "--output", str(tmp_path)])
    result = result_of(tmp_path)
    assert result["optimizer"] == optimizer
    assert [record["epoch"] for record in result["epochs"]] == [1, 2]
    assert result["epochs"][1]["train_loss"] < result["epochs"][0]["train_loss"]
    assert result["final"]["test_accuracy"] == result["epochs"][1]["test_accuracy"]
    assert {"commit", "versions", "hardware", "command", "seed"} <= result["provenance"][0].keys()
    assert not list(tmp_path.rglob("checkpoint.pt"))
    assert len((next(tmp_path.rglob("log.jsonl"))).read_text().splitlines()) == 2
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_settings_are_options_and_name_the_run(tmp_path, capsys):
    arguments = ["--batch-fraction", "0.25", "--lr", "0.2", "--seeds", "1", "2", "--output", str(tmp_path)]
    main(["train", "digits", *SHORT, *arguments])
    results = list(find_results([tmp_path], pytest.fail))
    assert [result.seed for result in results] == [1, 2]
    assert {result.name for result in results} == {"adahessian_epochs=2_lr=0.2_batch-fraction=0.25"}
    assert results[0].settings["batch_fraction"] == 0.25
    assert results[0].epochs[0]["train_loss"] != results[1].epochs[0]["train_loss"]
    assert "test accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(("task", "noise"), [("cifar10-resnet20", 2), ("digits", 2), ("imagenet-resnet18", 1)])
def test_the_economical_settings_make_up_for_the_noise_of_a_quarter(task, noise):
    paper, cheaper = parse_train([task]).settings, parse_train([task, "--economical"]).settings
    assert (cheaper.update_every, cheaper.batch_fraction, cheaper.steady_start) == (10, 0.25, True)
    tolerance = 1e-3 if noise != 1 else 0
    assert cheaper.lr == pytest.approx(paper.lr * noise, rel=tolerance)
    assert cheaper.weight_decay == pytest.approx(paper.weight_decay / noise, rel=tolerance)
    assert parse_train([task, "--economical", "--lr", "0.2"]).settings == replace(cheaper, lr=0.2)
    assert parse_train([task, "--economical", "--no-economical"]).settings == paper


def test_the_economical_settings_name_the_run():
    task = EXPERIMENTS["cifar10-resnet20"]
    economical = task.economical
    names = {
        "adahessian_economical": economical,
        "adahessian_economical_epochs=10": replace(economical, epochs=10),
        "adahessian_economical_update-every=20": replace(economical, update_every=20),
        "adahessian_economical_update-every=1": replace(economical, update_every=1),
        "adahessian_economical_lr=0.2_weight-decay=0.0025": replace(economical, lr=0.2, weight_decay=0.0025),
        "adahessian_economical_steady-start=False": replace(economical, steady_start=False),
        "adahessian_lr=0.3_weight-decay=0.001667_update-every=20_measured-epochs=1_steady-start=True": replace(
            economical, update_every=20, batch_fraction=1.0, tangents="float32"
        ),
        "adahessian": task.defaults["adahessian"],
    }
    assert [task.label("adahessian", settings) for settings in names.values()] == list(names)
    assert task.label("sgd", task.defaults["sgd"]) == "sgd"


def test_a_power_of_the_hessian_is_a_power_of_its_noise():
    settings = replace(EXPERIMENTS["ptb-tensorized"].defaults["adahessian"], lr=1.0, weight_decay=0.1)
    assert settings.hessian_power == 0.5
    cheaper = economized(settings, noise=4.0)
    assert (cheaper.lr, cheaper.weight_decay) == (2.0, 0.05)


def start(output: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "adahessian.lab.command", "train", "digits", *SHORT, "--output", str(output)]
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    main(["train", "digits", *SHORT, "--output", str(output)])
    torch.set_num_threads(threads)
    return output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_interrupted_and_resumed_it_ends_in_the_same_bits(tmp_path, undisturbed, number):
    """By a signal at whatever step it arrives; often checkpointed, so that a kill leaves one in the middle."""
    while True:
        run = start(tmp_path, "--checkpoint-minutes", "0.0001", "--overwrite")
        deadline = time.monotonic() + 600
        while not list(tmp_path.rglob("checkpoint.pt")) and run.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        run.send_signal(number)
        said = run.communicate(timeout=600)[0]
        if not list(tmp_path.rglob("*_seed-*.json")):
            break
        # It was faster than the look at it, or than the signal: once more.
        assert run.returncode == 0, said
    if number != signal.SIGKILL:
        assert run.returncode == 130
        assert "the same command with --resume instead of --overwrite goes on with this run" in said
    continued = start(tmp_path, "--resume")
    said = continued.communicate(timeout=600)[0]
    assert continued.returncode == 0, said
    assert_same_run(tmp_path, undisturbed)
    assert len(result_of(tmp_path)["provenance"]) == 2


def test_stopping_after_epochs_and_going_on(tmp_path, undisturbed):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    main(["train", "digits", *SHORT, "--output", str(tmp_path), "--stop-after-epochs", "1"])
    main(["train", "digits", *SHORT, "--output", str(tmp_path), "--resume"])
    torch.set_num_threads(threads)
    assert_same_run(tmp_path, undisturbed)


def refused(*arguments: str) -> str:
    with pytest.raises(SystemExit) as refusal:
        main(["train", *arguments])
    return str(refusal.value.code)


def test_an_earlier_run_is_not_touched_unless_asked(tmp_path, undisturbed):
    before = result_of(undisturbed)
    arguments = ("digits", *SHORT, "--output", str(undisturbed))
    assert "is finished. --resume passes over it, --overwrite begins anew" in refused(*arguments)
    main(["train", *arguments, "--resume"])
    assert result_of(undisturbed) == before


def test_overwriting_loses_nothing_to_a_run_that_cannot_begin(tmp_path):
    earlier = [
        tmp_path / "ptb-tensorized" / "adahessian_seed-1.json",
        tmp_path / "ptb-tensorized" / "adahessian_seed-1" / "checkpoint.pt",
    ]
    for path in earlier:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("earlier")
    arguments = ("ptb-tensorized", "--output", str(tmp_path), "--overwrite", "--data-dir", str(tmp_path / "nowhere"))
    assert "nowhere" in refused(*arguments)
    assert "--device" in refused(*arguments, "--device", "nothing")
    assert [path.read_text() for path in earlier] == ["earlier"] * 2


def test_overwriting_begins_anew(tmp_path, undisturbed):
    arguments = ["train", "digits", *SHORT, "--output", str(tmp_path)]
    main([*arguments, "--stop-after-steps", "3"])
    main([*arguments, "--overwrite"])
    assert len(result_of(tmp_path)["provenance"]) == 1
    main([*arguments, "--overwrite", "--stop-after-steps", "3"])
    assert not list(tmp_path.rglob("*_seed-*.json")), "the earlier result is gone"


def test_another_runs_checkpoint_is_refused(tmp_path):
    arguments = ["digits", *SHORT, "--output", str(tmp_path), "--name", "mine"]
    main(["train", *arguments, "--stop-after-epochs", "1"])
    said = refused(*arguments, "--lr", "0.1", "--resume")
    assert "differs in --lr. Choose another --name" in said
    checkpoint = next(tmp_path.rglob("checkpoint.pt"))
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    said = refused(*arguments, "--resume")
    assert "cannot be read: it is no checkpoint, or only a part of one. Restore it" in said


def test_a_run_from_before_there_was_a_setting_goes_on(tmp_path):
    arguments = ["digits", *SHORT, "--output", str(tmp_path), "--name", "mine"]
    main(["train", *arguments, "--stop-after-epochs", "1"])
    path = next(tmp_path.rglob("checkpoint.pt"))
    content = load_checkpoint(path)
    del content["identity"]["--steady-start"]
    del content["optimizer"]["param_groups"][0]["steady_start"]
    save_checkpoint(path, content)
    assert "differs in --steady-start" in refused(*arguments, "--steady-start", "--resume")
    main(["train", *arguments, "--resume"])
    (file,) = tmp_path.rglob("*_seed-*.json")
    result = json.loads(file.read_text())
    del result["settings"]["steady_start"]
    file.write_text(json.dumps(result))
    main(["train", *arguments, "--resume"])  # passes over it


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    arguments = ["digits", *SHORT, "--output", str(tmp_path)]
    main(["train", *arguments, "--stop-after-epochs", "1"])
    path = next(tmp_path.rglob("checkpoint.pt"))
    content = load_checkpoint(path)
    content["steps_per_epoch"] += 1
    save_checkpoint(path, content)
    assert "was begun on other data" in refused(*arguments, "--resume")


def test_a_finished_run_of_other_settings_is_not_passed_over(undisturbed):
    name = result_of(undisturbed)["name"]
    arguments = ("digits", *SHORT, "--output", str(undisturbed), "--name", name, "--resume")
    assert "differs in --lr, precision" in refused(*arguments, "--lr", "0.1", "--precision", "bfloat16")


def test_all_seeds_are_begun_when_each_is_to_stop(tmp_path, capsys):
    arguments = ["train", "digits", *SHORT, "--output", str(tmp_path), "--seeds", "1", "2", "--stop-after-epochs", "1"]
    main(arguments)
    assert capsys.readouterr().out.count("stopped after epoch 1 of 2") == 2
    assert len(list(tmp_path.rglob("checkpoint.pt"))) == 2


def test_a_few_steps_and_then_the_rest(tmp_path, undisturbed, capsys):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    arguments = ["train", "digits", *SHORT, "--output", str(tmp_path)]
    main([*arguments, "--stop-after-steps", "3"])
    assert "stopped in epoch 1 of 2, after step 3" in capsys.readouterr().out
    main([*arguments, "--resume"])
    torch.set_num_threads(threads)
    assert_same_run(tmp_path, undisturbed)


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    said = refused("digits", *SHORT, "--output", str(tmp_path / "file"))
    assert "Choose another --output" in said


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    arguments = ["digits", *SHORT, "--output", str(tmp_path)]
    main(["train", *arguments, "--stop-after-epochs", "1"])
    checkpoint = next(tmp_path.rglob("checkpoint.pt"))
    before = checkpoint.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in refused(*arguments, "--resume")
    assert checkpoint.read_bytes() == before
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "there is no task nothing. There are digits, cifar10-resnet20"),
        (["digits", "--optimizer", "lion"], "--optimizer lion: choose adahessian, sgd"),
        (["criteo-dlrm", "--optimizer", "adam"], "has no settings for adam"),
        (["digits", "--device", "teapot"], "--device teapot"),
        (["--optimizer", "sgd", "cifar10-resnet20"], "name the task first"),
        (["digits", "--optimizer", "sgd", "--economical"], "--economical is a setting of AdaHessian"),
        (
            ["digits", "--optimizer", "adam", "--num-probes", "4"],
            "--num-probes is a setting of AdaHessian",
        ),
        (["digits", "--optimizer", "sgd", "--batch-fraction", "0.5"], "--batch-fraction is a setting of AdaHessian"),
        (["cifar10-resnet-20"], "Perhaps you meant cifar10-resnet20?"),
        ([], "name the task first: digits"),
        (["--epochs", "2"], "name the task first: digits"),
        (["digits", "--device", "meta"], "--device meta: torch cannot compute on it here"),
        (["digits", "--resume", "--overwrite"], "say one of them"),
        (["digits", "--betas", "0.9", "1"], "--betas 0.9 1.0: both must be"),
        (["digits", "--lr", "-1"], "--lr -1.0: it must be 0 or more"),
        (["digits", "--epochs", "0"], "--epochs 0: it must be 1 or more"),
        (["digits", "--clip-norm", "-1"], "--clip-norm -1.0: it must be above 0"),
        (["digits", "--stop-after-steps", "0"], "--stop-after-steps 0: it must be above 0"),
        (["digits", "--seeds", "-1"], "--seeds takes one number or more, from 0 on"),
        (["digits", "--name", "../x"], "a name has no folders in it"),
        (["digits", "--device", "cpu", "--batch-size", "5000", "--data-dir", "."], "does not fill a single batch"),
        (["cifar10-resnet20", "--data-dir", "nowhere", "--device", "cpu"], "nowhere"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, arguments, said):
    assert said in refused(*arguments, *(["--output", str(tmp_path)] if "--data-dir" in arguments else []))


def test_what_cannot_begin_leaves_nothing_behind_and_missing_data_is_to_be_fetched(tmp_path):
    said = refused("cifar10-resnet20", "--data-dir", "nowhere", "--device", "cpu", "--output", str(tmp_path))
    assert "adahessian fetch cifar10-resnet20 gets the data from its owners, or says how" in said
    too_large = ("digits", "--batch-size", "5000", "--device", "cpu", "--output", str(tmp_path))
    assert "adahessian fetch" not in refused(*too_large)
    assert not list(tmp_path.iterdir())


def test_how_to_go_on_and_how_fast_it_was_is_said(tmp_path, capsys):
    arguments = ["train", "digits", *SHORT, "--output", str(tmp_path), "--stop-after-steps"]
    main([*arguments, "1"])
    first = capsys.readouterr().out
    assert "the same command with --resume goes on" in first
    assert "/step" not in first.splitlines()[-1], "the first step is no measure of the others"
    main([*arguments, "3", "--overwrite"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"after step 3: mean loss \d\.\d+, \d+\.\d m?s/step; ", last)
    assert "the same command with --resume instead of --overwrite goes on" in last


def test_a_run_that_diverges_ends_early_and_says_so(tmp_path, capsys):
    main(["train", "digits", "--optimizer", "sgd", *SHORT, "--lr", "1e30", "--output", str(tmp_path)])
    result = result_of(tmp_path)
    assert result["diverged"]
    assert result["final"] == {}
    assert result["epochs"][0]["train_loss"] is None
    assert len(result["epochs"]) == 1
    assert "diverged" in capsys.readouterr().out


def test_a_study_runs_its_variants_and_passes_over_those_that_are_finished(tmp_path, capsys):
    arguments = ["study", "averaging", "--task", "digits", "--epochs", "1", "--output", str(tmp_path)]
    main([*arguments, "--device", "cpu"])
    assert {result.settings["averaging"] for result in find_results([tmp_path], pytest.fail)} == {"magnitude", "signed"}
    capsys.readouterr()
    main([*arguments, "--device", "cpu"])
    assert capsys.readouterr().out.count("is finished") == 2


def test_a_study_takes_settings_and_varies_around_them(tmp_path):
    arguments = ["study", "delay", "--task", "digits", "--epochs", "1", "--lr", "0.2", "--stop-after-steps", "1"]
    main([*arguments, "--device", "cpu", "--output", str(tmp_path)])
    names = sorted(path.name for path in (tmp_path / "digits").iterdir())
    assert len(names) == 7
    assert all("lr=0.2" in name for name in names)
    assert any("update-every=20_measured-epochs=0.03125" in name for name in names)


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out.startswith("adahessian 0")
