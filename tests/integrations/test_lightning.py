"""Lightning's Trainer takes the steps of a plain loop, and nothing happens twice."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

import adahessian.integrations
from adahessian import AdaHessian, Curvature, param_groups

L = pytest.importorskip("lightning")

from lightning.pytorch.loggers.logger import DummyLogger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from torchmetrics import MetricCollection  # noqa: E402
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision  # noqa: E402

from adahessian.integrations.lightning import CurvatureCallback  # noqa: E402

# Lightning 2.6 uses functions that torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")

REPOSITORY = Path(__file__).parents[2]
OPTIONS = {"lr": 0.05, "eps": 1e-2, "block_size": 4}
STEPS = 7
BFLOAT16 = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
FLOAT16 = torch.autocast("cpu", torch.float16, cache_enabled=False)


class Batches:
    """A loader that draws no random numbers."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def batches(count=STEPS, size=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 5, generator=generator, dtype=dtype), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


class Net(L.LightningModule):
    """Batch norm and dropout show whether a measurement leaves traces."""

    def __init__(self, options=OPTIONS, total_steps=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 3))
        self.options, self.total_steps = options, total_steps

    def loss(self, batch):
        x, y = batch
        return cross_entropy(self.layers(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = AdaHessian(self.parameters(), **self.options)
        if self.total_steps is None:
            return optimizer
        schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=self.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class PlainNet(Net):
    """A net without batch norm and dropout."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.layers = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))


def trainer(*callbacks, library=L, **kwargs):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return library.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **kwargs}, callbacks=list(callbacks)
    )


def fit(net, *callbacks, data=None, **kwargs):
    torch.manual_seed(2)
    trainer(*callbacks, **kwargs).fit(net, Batches(batches() if data is None else data))
    return net


def loop(
    net, data=None, *, loss=Net.loss, measured=None, clip=None, autocast=None, scaler=None, micro_batches=1, **options
):
    """Do what the Trainer does. A batch may be None, for a step without gradients."""
    torch.manual_seed(2)
    data = batches() if data is None else data
    configured = net.configure_optimizers()
    optimizer, schedule = (
        (configured["optimizer"], configured["lr_scheduler"]["scheduler"])
        if isinstance(configured, dict)
        else (configured, None)
    )
    curvature = Curvature(net, measured or loss, optimizer, scaler=scaler, **options)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for number, batch in enumerate(data, 1):
        if batch is not None:
            with autocast or nullcontext():
                curvature.measure(batch)
            with autocast or nullcontext():
                value = loss(net, batch)
            scaler.scale(value / micro_batches).backward()
        if number % micro_batches and number < len(data):
            continue
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return net


def assert_same(net, other):
    torch.testing.assert_close(net.state_dict(), other.state_dict(), rtol=0, atol=0)


# Automatic optimization ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "measured", "trained", "expected"),
    [
        pytest.param({}, {}, {}, {}, id="defaults"),
        pytest.param({"curvature_every": 3}, {"batch_fraction": 0.5}, {}, {}, id="half a batch at every third step"),
        pytest.param({}, {}, {"gradient_clip_val": 0.05}, {"clip": 0.05}, id="clipping"),
        pytest.param({}, {}, {"precision": "bf16-mixed"}, {"autocast": BFLOAT16}, id="bfloat16"),
        pytest.param(
            {},
            {},
            {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))},
            {"autocast": FLOAT16, "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10)},
            id="float16 with a scaler",
        ),
    ],
)
def test_trains_as_a_loop_does(options, measured, trained, expected):
    nets = [Net({**OPTIONS, **options}, total_steps=STEPS) for _ in range(2)]
    fit(nets[0], CurvatureCallback(**measured), **trained)
    loop(nets[1], **measured, **expected)
    assert_same(*nets)


def test_a_scaler_that_skips_steps_skips_their_curvature():
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-110) for _ in range(2)]
    net = fit(Net(), CurvatureCallback(), plugins=MixedPrecision("16-mixed", "cpu", scalers[0]))
    assert scalers[0].get_scale() < 2.0**127
    assert_same(net, loop(Net(), autocast=FLOAT16, scaler=scalers[1]))


def test_accumulated_gradients_have_accumulated_curvature():
    """Group seven batches by three: the last step has a single batch."""
    net = fit(Net(), CurvatureCallback(), accumulate_grad_batches=3)
    assert_same(net, loop(Net(), micro_batches=3))


def test_accumulated_batches_are_one_large_batch():
    data = batches(6, dtype=torch.float64)
    large = [tuple(map(torch.cat, zip(*data[i : i + 3], strict=True))) for i in (0, 3)]
    small = fit(PlainNet().double(), CurvatureCallback(), data=data, accumulate_grad_batches=3)
    whole = loop(PlainNet().double(), large)
    torch.testing.assert_close(small.state_dict(), whole.state_dict(), rtol=1e-9, atol=1e-12)


class Regularized(PlainNet):
    """Trains on a penalty too, which ``loss`` leaves out."""

    def training_step(self, batch, batch_idx):
        return {"loss": self.whole_loss(batch), "more": 1}

    def whole_loss(self, batch):
        return self.loss(batch) + self.layers[0].weight.pow(4).sum()


@pytest.mark.parametrize("loss_fn", [None, Regularized.loss])
def test_a_loss_function_takes_the_place_of_the_training_step(loss_fn):
    net = fit(Regularized(), CurvatureCallback(loss_fn))
    assert_same(net, loop(Regularized(), loss=Regularized.whole_loss, measured=loss_fn))


def test_training_step_may_take_the_batch_alone_and_change_it():
    class Careless(PlainNet):
        def training_step(self, batch):
            labels = batch.pop("y")
            return self.loss((batch["x"].mul_(2), labels))

    data = [{"x": x.clone(), "y": y} for x, y in batches()]
    net = fit(Careless(), CurvatureCallback(), data=data)
    assert_same(net, loop(PlainNet(), [(x * 2, y) for x, y in batches()]))


def test_batches_that_lightning_skips_are_not_measured():
    class Choosy(PlainNet):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in (0, 3) else self.loss(batch)

    net = Choosy()
    with pytest.warns(UserWarning, match="returned `None`"):
        fit(net, CurvatureCallback())
    assert_same(net, loop(PlainNet(), [None if i in (0, 3) else batch for i, batch in enumerate(batches())]))


def test_sparse_embeddings():
    class Words(PlainNet):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.EmbeddingBag(20, 6, sparse=True), nn.Linear(6, 3))

        def configure_optimizers(self):
            return AdaHessian(param_groups(self, sparse_lr=0.1), **OPTIONS)

    generator = torch.Generator().manual_seed(1)
    words = [(torch.randint(20, (8, 4), generator=generator), labels[:8]) for _, labels in batches()]
    assert_same(fit(Words(), CurvatureCallback(), data=words), loop(Words(), words))


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_module(whole):
    class Quiet(Net):  # torch 2.13 cannot compile self.log
        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    net = Quiet()
    if not whole:
        net.layers.compile(backend="eager")
    fit(torch.compile(net, backend="eager") if whole else net, CurvatureCallback())
    assert_same(net, loop(Net()))


# Nothing twice -------------------------------------------------------------------------------------------------------


class Ledger(DummyLogger):
    """Keeps everything that is logged."""

    def __init__(self):
        super().__init__()
        self.entries = []

    def log_metrics(self, metrics, step=None):
        self.entries.append(metrics)


class Counting(Net):
    """Counts in each way that users of Lightning count."""

    def __init__(self):
        super().__init__({**OPTIONS, "curvature_every": 2})
        self.steps = 0
        self.share = torch.zeros(())
        self.losses, self.kept, self.sums = [], {"train": []}, {"steps": torch.zeros(())}
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.scores = MetricCollection({"accuracy": MulticlassAccuracy(3), "precision": MulticlassPrecision(3)})

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.steps += 1
        self.share += 1 / STEPS
        self.losses.append(loss.detach())
        self.kept["train"].append(batch_idx)
        self.sums["steps"] += 1
        predictions = self.layers(batch[0])
        self.accuracy(predictions, batch[1])
        self.scores.update(predictions, batch[1])
        self.log_dict({"count": 1.0, "accuracy": self.accuracy}, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log(f"loss of {len(batch[0])}", loss, on_epoch=True)
        self.logger.log_metrics({"directly": batch_idx})
        return loss


def test_nothing_is_logged_or_counted_twice():
    ledger, net = Ledger(), Counting()
    fit(net, CurvatureCallback(batch_fraction=0.5), logger=ledger, log_every_n_steps=1)
    assert net.steps == len(net.losses) == net.sums["steps"] == STEPS
    assert net.kept == {"train": list(range(STEPS))}
    torch.testing.assert_close(net.share, torch.ones(()))
    assert [entry["directly"] for entry in ledger.entries if "directly" in entry] == list(range(STEPS))
    (at_the_end,) = [entry for entry in ledger.entries if "count" in entry]
    assert at_the_end["count"] == STEPS
    assert not any("loss of 8" in name for entry in ledger.entries for name in entry)
    assert net.scores["accuracy"].update_count == STEPS
    assert int(net.scores["accuracy"].tp.sum() + net.scores["accuracy"].fn.sum()) == STEPS * 16
    assert "log" not in vars(net)


# Checkpoints and validation ------------------------------------------------------------------------------------------


def test_resumes_from_a_checkpoint_bit_by_bit(tmp_path):
    """Measure at every fourth of seven steps per epoch, so that the checkpoint is between two measurements."""

    def made():
        net = Net({**OPTIONS, "curvature_every": 4}, total_steps=3 * STEPS)
        net.layers[3].p = 0.0  # Lightning's checkpoints do not include random states
        return net

    straight = fit(made(), CurvatureCallback(), max_epochs=3)
    first = trainer(CurvatureCallback())
    first.fit(made(), Batches(batches()))
    first.save_checkpoint(tmp_path / "epoch.ckpt")
    resumed = made()
    second = trainer(CurvatureCallback(), max_epochs=3)
    second.fit(resumed, Batches(batches()), ckpt_path=tmp_path / "epoch.ckpt")
    assert second.global_step == 3 * STEPS
    assert_same(resumed, straight)


def test_validation_in_between_changes_nothing():
    class Validated(Net):
        def validation_step(self, batch, batch_idx):
            self.log("validation", self.loss(batch))

    nets = [Validated({**OPTIONS, "curvature_every": 2}) for _ in range(2)]
    torch.manual_seed(2)
    validating = trainer(CurvatureCallback(), val_check_interval=3, num_sanity_val_steps=1)
    validating.fit(nets[0], Batches(batches()), Batches(batches(2)))
    assert "validation" in validating.logged_metrics
    assert_same(nets[0], loop(nets[1]))


# Manual optimization -------------------------------------------------------------------------------------------------


def documented_module():
    """Run the documentation's code for manual optimization."""
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    code = page.split("Manual optimization")[1].split("```python\n")[1].split("```")[0]
    names = {"L": L, "torch": torch, "adahessian": adahessian}
    exec(code, names)
    return names["Classifier"]


class Manual(documented_module()):
    configure_optimizers, options, total_steps = Net.configure_optimizers, OPTIONS, None


class Automatic(PlainNet):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(5, 3)


def small(net_class):
    net = net_class()
    torch.manual_seed(0)
    net.load_state_dict(nn.ModuleDict({"layers": nn.Linear(5, 3)}).state_dict())
    return net


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_manual_optimization_as_documented(precision):
    if precision == "bfloat16":
        net = fit(small(Manual), precision="bf16-mixed")
        expected = loop(small(Automatic), autocast=BFLOAT16)
    else:
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
        net = fit(small(Manual), plugins=MixedPrecision("16-mixed", "cpu", scalers[0]))
        expected = loop(small(Automatic), autocast=FLOAT16, scaler=scalers[1])
    assert_same(net, expected)


# Errors --------------------------------------------------------------------------------------------------------------


def test_needs_an_adahessian():
    class WithAdam(PlainNet):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    with pytest.raises(TypeError, match="optimizer"):
        fit(WithAdam(), CurvatureCallback())


def test_rejects_manual_optimization():
    with pytest.raises(ValueError, match="automatic_optimization"):
        fit(Manual(), CurvatureCallback())


def test_rejects_a_training_step_that_fetches_its_own_batches():
    class Fetching(PlainNet):
        def training_step(self, dataloader_iter):
            return self.loss(next(dataloader_iter)[0])

    with pytest.warns(UserWarning, match="dragons"), pytest.raises(ValueError, match="dataloader_iter"):
        fit(Fetching(), CurvatureCallback())


def test_names_the_extra(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "adahessian.integrations.lightning")
    with pytest.raises(ImportError, match=r"adahessian\[lightning\]"):
        import adahessian.integrations.lightning  # noqa: F401


def test_imports_the_package_of_the_other_name_if_it_is_in_use(monkeypatch):
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    monkeypatch.delitem(sys.modules, "adahessian.integrations.lightning")
    monkeypatch.setattr(adahessian.integrations, "lightning", None)
    other = pytest.importorskip("pytorch_lightning")
    from adahessian.integrations.lightning import CurvatureCallback as OtherCallback

    class OtherNet(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = PlainNet().layers

        def training_step(self, batch, batch_idx):
            return PlainNet.loss(self, batch)

        def configure_optimizers(self):
            return AdaHessian(self.parameters(), **OPTIONS)

    net = OtherNet()
    trainer(OtherCallback(), library=other).fit(net, Batches(batches()))
    assert_same(net, loop(PlainNet()))


# Processes of their own ----------------------------------------------------------------------------------------------


def run(*command, folder, seconds=300):
    """Run Python in a folder outside the repository, and return what it prints."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class OneOfTwo:
    """Trains on its rank's half of each batch, and saves the result."""

    def train_dataloader(self):
        return Batches([tuple(t.chunk(2)[self.global_rank] for t in batch) for batch in batches(dtype=torch.float64)])

    def on_train_end(self):
        torch.save(self.state_dict(), f"{type(self).__name__}{self.global_rank}.pt")


class AutomaticOfTwo(OneOfTwo, Automatic):
    pass


class ManualOfTwo(OneOfTwo, Manual):
    pass


class WithoutALoss(AutomaticOfTwo):
    def training_step(self, batch, batch_idx):
        return None if self.global_rank == 1 and batch_idx == 2 else self.loss(batch)


def on_two_ranks():
    def train(net_class, *callbacks):
        strategy = DDPStrategy(process_group_backend="gloo", start_method="fork")
        trainer(*callbacks, devices=2, strategy=strategy).fit(small(net_class).double())

    train(AutomaticOfTwo, CurvatureCallback())
    train(ManualOfTwo)
    with pytest.raises(Exception, match="training_step"):
        train(WithoutALoss, CurvatureCallback())


def test_two_ranks_are_one_process_on_the_whole_batch(tmp_path):
    run("-c", "import test_lightning; test_lightning.on_two_ranks()", folder=tmp_path)
    whole = loop(small(Automatic).double(), batches(dtype=torch.float64))
    for kind in (AutomaticOfTwo, ManualOfTwo):
        first, second = (torch.load(tmp_path / f"{kind.__name__}{rank}.pt") for rank in (0, 1))
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        torch.testing.assert_close(first, whole.state_dict(), rtol=1e-9, atol=1e-12)


def test_the_example_runs_as_written(tmp_path):
    printed = run(REPOSITORY / "examples" / "lightning_digits.py", "--epochs", 1, folder=tmp_path)
    accuracy = float(printed.split("accuracy")[-1].split()[0].strip("%:"))
    assert 50 < accuracy <= 100
