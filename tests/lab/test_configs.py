import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from adahessian.lab.commands.train import parse_runs
from adahessian.lab.configs import PRESETS, find_preset
from adahessian.lab.configs.optimizers import OPTIMIZERS, SGD, AdaHessian, AdaHessianKron, AdamW
from adahessian.lab.configs.run import ScheduleConfig, difference, label, options_of
from adahessian.lab.errors import ConfigError

GOLDENS = json.loads(Path(__file__).with_name("goldens.json").read_text())
CIFAR10 = find_preset("cifar10-resnet20").config("adahessian")
GPT = find_preset("gpt-chars").config("adamw").task


def test_configs_import_nothing_heavy():
    heavy = ("torch", "numpy", "pandas", "matplotlib", "sklearn", "scipy", "transformers", "tokenizers")
    program = f"import sys, adahessian.lab.configs; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_complete(name):
    preset = PRESETS[name]
    assert preset.title
    assert preset.data.endswith(".")
    assert preset.notes
    assert "adahessian-kron" in preset.optimizers
    for optimizer in preset.optimizers:
        config = preset.config(optimizer)
        assert type(config.optimizer) is OPTIMIZERS[optimizer]
        parts = (config, config.task, config.optimizer, config.schedule)
        names = [option.name for part in parts for option in fields(part)][3:]
        # Options are typed without prefixes.
        assert len(names) == len({*names})
        assert options_of(config).keys() == {*names}
        assert config.task.default_holdout == 0 or "holdout" in names


@pytest.mark.parametrize("optimizer", ["adahessian-kron", "sgd"])
def test_every_option_has_help(optimizer, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        parse_runs(["digits", optimizer, "--help"], "adahessian train")
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for option in options_of(find_preset("digits").config(optimizer)):
        found = re.findall(rf" --{option.replace('_', '-')}[ ,].*?(.) \(default: ", printed)
        assert found == ["."], option


# The goldens hold the settings that tasks had before they were rewritten, and the options that made them small.
RENAMED = {"update_every": "curvature_every", "tangents": "product_dtype"}


@pytest.mark.parametrize("name", GOLDENS)
def test_presets_kept_their_values(name):
    task, optimizer, _ = name.split()
    found = options_of(find_preset(task).config(optimizer))
    made_small = {RENAMED.get(key, key) for key in GOLDENS[name]["overrides"]}
    expected = {RENAMED.get(key, key): value for key, value in GOLDENS[name]["settings"].items()}
    shared = (found.keys() & expected.keys()) - made_small
    assert {"lr", "schedule", "lr_warmup_steps"} <= shared
    assert {key: list(each) if isinstance(each := found[key], tuple) else each for key in shared} == {
        key: expected[key] for key in shared
    }


def test_unknown_names_get_suggestions():
    with pytest.raises(ConfigError, match="cifar10-resnet20"):
        find_preset("cifar10-resnet2")
    with pytest.raises(ConfigError, match="adamw"):
        find_preset("digits").config("adamww")
    with pytest.raises(ConfigError, match=r"digits.*criteo-dlrm"):
        find_preset("x")


def test_a_label_has_the_options_that_differ():
    changed = replace(CIFAR10, optimizer=replace(CIFAR10.optimizer, lr=0.3, betas=(0.9, 0.99)), epochs=8)
    assert label("adahessian", CIFAR10, CIFAR10) == "adahessian"
    assert label("adahessian", changed, CIFAR10) == "adahessian lr=0.3 betas=0.9+0.99 epochs=8"
    folder = find_preset("image-folder-resnet18").config("sgd")
    assert difference(replace(folder, task=replace(folder.task, workers=0)), folder) == {}


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: SGD(lr=-1.0), "--lr -1"),
        (lambda: SGD(lr=float("nan")), "--lr nan"),
        (lambda: SGD(lr=0.1, momentum=1.0), "--momentum 1"),
        (lambda: SGD(lr=0.1, clip_norm=0.0), "--clip-norm 0"),
        (lambda: AdamW(lr=0.1, betas=(0.9, 1.0)), "--betas 1"),
        (lambda: AdaHessian(lr=0.1, hessian_power=2.0), "--hessian-power 2"),
        (lambda: AdaHessian(lr=0.1, batch_fraction=0.0), "--batch-fraction 0"),
        (lambda: AdaHessianKron(lr=0.1, curvature_every=0), "--curvature-every 0"),
        (lambda: AdaHessianKron(lr=0.1, damping=0.0), "--damping 0"),
        (lambda: ScheduleConfig(lr_warmup_steps=-1), "--lr-warmup-steps -1"),
        (lambda: replace(CIFAR10, epochs=0), "--epochs 0"),
        (lambda: replace(CIFAR10, task=replace(CIFAR10.task, batch_size=0)), "--batch-size 0"),
        (lambda: replace(GPT, heads=3), "--heads 3"),
        (lambda: replace(GPT, vocabulary=300), "--vocabulary 300"),
    ],
)
def test_invalid_values_name_their_option(make, option):
    with pytest.raises(ConfigError, match=option):
        make()
