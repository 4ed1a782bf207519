"""Trainers that are configured with the documentation's code give the same result as a plain loop."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import adahessian
from adahessian import AdaHessianKron, Curvature

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()


def blocks(heading, language):
    """Return the code blocks below a heading of the documentation."""
    section = re.split(r"^##+ ", PAGE.split(f"# {heading}\n")[1], flags=re.MULTILINE)[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(32, 5, generator=generator), torch.randint(3, (32,), generator=generator))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))


def loop(model, lr, batch_fraction=0.25, batch_size=8):
    optimizer = AdaHessianKron(model.parameters(), lr=lr)
    curvature = Curvature(
        model, lambda model, batch: cross_entropy(model(batch[0]), batch[1]), optimizer, batch_fraction=batch_fraction
    )
    for batch in DataLoader(data(), batch_size):
        curvature.measure(batch)
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
    return model.state_dict()


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


# LightningCLI ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # Lightning and jsonargparse deprecate each other's functions
@pytest.mark.parametrize("form", ["command", "file"])
def test_lightning_cli(form, tmp_path, monkeypatch):
    L = pytest.importorskip("lightning")
    pytest.importorskip("jsonargparse")
    pytest.importorskip("typeshed_client", reason="LightningCLI needs jsonargparse[signatures]")
    from lightning.pytorch.cli import LightningCLI

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, batch_idx):
            return cross_entropy(self.net(batch[0]), batch[1])

        def train_dataloader(self):
            return DataLoader(data(), 8)

    if form == "command":
        (command,) = blocks("LightningCLI", "")
        arguments = command.replace("\\\n", " ").split()[2:]
    else:
        (tmp_path / "config.yaml").write_text(blocks("LightningCLI", "yaml")[0])
        arguments = ["fit", f"--config={tmp_path / 'config.yaml'}"]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet}
    monkeypatch.setattr("sys.argv", ["main.py"])  # Lightning warns if both places have arguments
    settings = {"trainer_defaults": options, "save_config_callback": None, "seed_everything_default": False}
    cli = LightningCLI(Net, args=arguments, **settings)
    assert_same(cli.model.net.state_dict(), loop(net(), lr=1e-3))
    with pytest.raises(SystemExit):
        LightningCLI(Net, args=[*arguments, "--trainer.callbacks.batch_fractions=0.5"], **settings)


# torchtune ------------------------------------------------------------------------------------------------------------


def test_torchtune():
    config = pytest.importorskip("torchtune.config", exc_type=ImportError)
    from omegaconf import OmegaConf

    (configured,) = blocks("torchtune", "yaml")
    setup, measure = blocks("torchtune", "python")
    names = {"adahessian": adahessian}
    exec(setup, names)

    class Recipe(SimpleNamespace):
        """The parts of a recipe that the documentation changes."""

        setup = names["setup"]

        def _loss_step(self, batch):
            labels = batch.pop("labels")
            return cross_entropy(self._model(**batch), labels)

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, tokens):
            return self.net(tokens)

    recipe = Recipe(_model=Tokens())
    recipe._optimizer = config.instantiate(OmegaConf.create(configured).optimizer, recipe._model.parameters())
    assert type(recipe._optimizer) is AdaHessianKron
    recipe.setup(None)
    for tokens, labels in DataLoader(data(), 8):
        batch = {"tokens": tokens, "labels": labels}
        exec(measure, {"self": recipe, "batch": batch, "current_num_tokens": torch.tensor(8)})
        recipe._optimizer.zero_grad()
        recipe._loss_step(batch).backward()
        recipe._optimizer.step()
    assert_same(recipe._model.net.state_dict(), loop(net(), lr=2e-5))


# MMEngine -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # MMEngine uses functions that torch deprecates
def test_mmengine(tmp_path):
    pytest.importorskip("mmengine.runner", exc_type=ImportError)
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Net(BaseModel):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, inputs, labels, mode):
            return {"loss": cross_entropy(self.net(inputs), labels)}

    class Examples(torch.utils.data.Dataset):
        def __len__(self):
            return len(data())

        def __getitem__(self, index):
            return dict(zip(("inputs", "labels"), data()[index], strict=True))

    (code,) = blocks("MMEngine", "python")
    exec(code, names := {"adahessian": adahessian})
    loader = {
        "dataset": Examples(),
        "batch_size": 8,
        "sampler": {"type": "DefaultSampler", "shuffle": False},
        "collate_fn": {"type": "default_collate"},
    }
    runner = Runner(
        Net(), str(tmp_path), loader, train_cfg={"by_epoch": True, "max_epochs": 1}, **names["runner_options"]
    )
    model = runner.train()
    assert type(runner.optim_wrapper.optimizer) is AdaHessianKron
    assert_same(model.net.state_dict(), loop(net(), lr=1e-3))
