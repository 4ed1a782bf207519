"""Lightning's Trainer, the real one, beside the same training written out as a loop."""

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
from adahessian import AdaHessian, Curvature, DenseAndSparse

L = pytest.importorskip("lightning")

from lightning.pytorch.loggers.logger import DummyLogger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from torchmetrics import MetricCollection  # noqa: E402
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision  # noqa: E402

from adahessian.integrations.lightning import AdaHessianCallback  # noqa: E402

# Lightning 2.6 uses what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")

REPOSITORY = Path(__file__).parents[2]
SETTINGS = {"lr": 0.05, "eps": 1e-2, "block_size": 4}
STEPS = 7


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
    """Batch norm and dropout notice a pass that leaves traces."""

    def __init__(self, settings=SETTINGS, total_steps=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 3))
        self.settings, self.total_steps = settings, total_steps

    def loss(self, batch):
        x, y = batch
        return cross_entropy(self.layers(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = AdaHessian(self.parameters(), **self.settings)
        if self.total_steps is None:
            return optimizer
        schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=self.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class PlainNet(Net):
    """Without what depends on the other examples of a batch, or on chance."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.layers = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))


def trainer(*callbacks, library=L, **settings):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return library.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **settings}, callbacks=list(callbacks)
    )


def fit(net, *callbacks, data=None, **settings):
    torch.manual_seed(2)
    trainer(*callbacks, **settings).fit(net, Batches(batches() if data is None else data))
    return net


def loop(net, data, *, clip=None, autocast=None, scaler=None, micro_batches=1, **settings):
    """What the Trainer is to do, written out."""
    torch.manual_seed(2)
    configured = net.configure_optimizers()
    optimizer, schedule = (
        (configured["optimizer"], configured["lr_scheduler"]["scheduler"])
        if isinstance(configured, dict)
        else (configured, None)
    )
    scaler = torch.amp.GradScaler("cpu", enabled=False) if scaler is None else scaler
    curvature = Curvature(net, type(net).loss, optimizer, scaler=scaler if scaler.is_enabled() else None, **settings)
    for number, batch in enumerate(data, 1):
        with autocast or nullcontext():
            curvature.measure(batch)
        with autocast or nullcontext():
            loss = net.loss(batch)
        scaler.scale(loss / micro_batches).backward()
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


# Automatic optimisation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "measured", "trained", "expected"),
    [
        pytest.param({}, {}, {}, {}, id="defaults"),
        pytest.param({"update_every": 3}, {"batch_fraction": 0.5}, {}, {}, id="half a batch at every third step"),
        pytest.param({}, {}, {"gradient_clip_val": 0.05}, {"clip": 0.05}, id="clipping"),
        pytest.param(
            {},
            {},
            {"precision": "bf16-mixed"},
            {"autocast": torch.autocast("cpu", torch.bfloat16, cache_enabled=False)},
            id="bfloat16",
        ),
        pytest.param(
            {},
            {},
            {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))},
            {
                "autocast": torch.autocast("cpu", torch.float16, cache_enabled=False),
                "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10),
            },
            id="float16 with a scaler",
        ),
        pytest.param({}, {"accumulate": False}, {"gradient_clip_algorithm": "norm"}, {}, id="without a mean"),
    ],
)
def test_trains_as_a_loop_does(settings, measured, trained, expected):
    nets = [Net({**SETTINGS, **settings}, total_steps=STEPS) for _ in range(2)]
    fit(nets[0], AdaHessianCallback(**measured), **trained)
    loop(nets[1], batches(), **measured, **expected)
    assert_same(*nets)


def test_a_scaler_that_skips_steps_skips_their_curvature():
    nets = [Net() for _ in range(2)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-110) for _ in range(2)]
    fit(nets[0], AdaHessianCallback(), plugins=MixedPrecision("16-mixed", "cpu", scalers[0]))
    autocast = torch.autocast("cpu", torch.float16, cache_enabled=False)
    loop(nets[1], batches(), autocast=autocast, scaler=scalers[1], accumulate=True)
    assert scalers[0].get_scale() < 2.0**127
    assert_same(*nets)


@pytest.mark.parametrize("accumulate", [True, False])
def test_accumulated_gradients_have_accumulated_curvature_or_that_of_the_first_batch(accumulate):
    """Seven batches by threes: the last step has one alone."""
    nets = [Net() for _ in range(2)]
    fit(nets[0], AdaHessianCallback(accumulate=accumulate), accumulate_grad_batches=3)
    loop(nets[1], batches(), micro_batches=3, accumulate=accumulate)
    assert_same(*nets)


def test_accumulated_batches_are_one_large_batch():
    data = batches(6, dtype=torch.float64)
    large = [tuple(map(torch.cat, zip(*data[i : i + 3], strict=True))) for i in (0, 3)]
    small = fit(PlainNet().double(), AdaHessianCallback(), data=data, accumulate_grad_batches=3)
    whole = loop(PlainNet().double(), large)
    torch.testing.assert_close(small.state_dict(), whole.state_dict(), rtol=1e-9, atol=1e-12)


class Regularised(PlainNet):
    """Trains on more than the curvature of its ``loss`` has to know of."""

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch) + self.penalty(), "more": 1}

    def penalty(self):
        return self.layers[0].weight.pow(4).sum()

    def whole_loss(self, batch):
        return self.loss(batch) + self.penalty()


@pytest.mark.parametrize("loss_fn", [None, Regularised.loss])
def test_a_loss_function_takes_the_place_of_the_training_step(loss_fn):
    net, expected = fit(Regularised(), AdaHessianCallback(loss_fn)), Regularised()
    optimizer = expected.configure_optimizers()
    curvature = Curvature(expected, loss_fn or Regularised.whole_loss, optimizer)
    for batch in batches():
        curvature.measure(batch)
        optimizer.zero_grad()
        expected.whole_loss(batch).backward()
        optimizer.step()
    assert_same(net, expected)


def test_training_step_may_take_the_batch_alone_and_take_it_apart():
    class Careless(PlainNet):
        def training_step(self, batch):
            labels = batch.pop("y")
            return self.loss((batch["x"].mul_(2), labels))

    data = [{"x": x.clone(), "y": y} for x, y in batches()]
    net = fit(Careless(), AdaHessianCallback(), data=data)
    assert_same(net, loop(PlainNet(), [(x * 2, y) for x, y in batches()]))


def test_batches_that_lightning_skips_are_not_measured():
    class Choosy(PlainNet):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in (0, 3) else self.loss(batch)

    net = Choosy()
    with pytest.warns(UserWarning, match="returned `None`"):
        fit(net, AdaHessianCallback())
    expected = PlainNet()
    optimizer = expected.configure_optimizers()
    curvature = Curvature(expected, Net.loss, optimizer)
    for number, batch in enumerate(batches()):
        optimizer.zero_grad()
        if number not in (0, 3):
            curvature.measure(batch)
            expected.loss(batch).backward()
        optimizer.step()
    assert_same(net, expected)


def test_sparse_embeddings():
    class Words(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.EmbeddingBag(20, 6, sparse=True), nn.Linear(6, 3))

        def loss(self, batch):
            return cross_entropy(self.layers(batch[0]), batch[1])

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

        def configure_optimizers(self):
            return DenseAndSparse(self, **SETTINGS)

    generator = torch.Generator().manual_seed(1)
    words = [
        (torch.randint(20, (8, 4), generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(5)
    ]
    net, expected = fit(Words(), AdaHessianCallback(), data=words), Words()
    optimizer = expected.configure_optimizers()
    curvature = Curvature(expected, Words.loss, optimizer)
    for batch in words:
        curvature.measure(batch)
        optimizer.zero_grad()
        expected.loss(batch).backward()
        optimizer.step()
    assert_same(net, expected)


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_module(whole):
    class Quiet(Net):  # the compiler of torch 2.13 fails in self.log
        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    net = Quiet()
    if not whole:
        net.layers.compile(backend="eager")
    fit(torch.compile(net, backend="eager") if whole else net, AdaHessianCallback())
    assert_same(net, loop(Net(), batches()))


# Nothing twice ----------------------------------------------------------------------------------------------------


class Ledger(DummyLogger):
    """Keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.entries = []

    def log_metrics(self, metrics, step=None):
        self.entries.append(metrics)


class Counting(Net):
    """Counts in every way that Lightning's users count in."""

    def __init__(self):
        super().__init__({**SETTINGS, "update_every": 2})
        self.steps = 0
        self.share = torch.zeros(())
        self.losses, self.kept = [], {"train": []}
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.scores = MetricCollection({"accuracy": MulticlassAccuracy(3), "precision": MulticlassPrecision(3)})

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.steps += 1
        self.share += 1 / STEPS
        self.losses.append(loss.detach())
        self.kept["train"].append(batch_idx)
        predictions = self.layers(batch[0])
        self.accuracy(predictions, batch[1])
        self.scores.update(predictions, batch[1])
        self.log_dict({"count": 1.0, "accuracy": self.accuracy}, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log(f"loss of {len(batch[0])}", loss, on_epoch=True)
        self.logger.log_metrics({"directly": batch_idx})
        return loss


def test_nothing_is_logged_or_counted_twice():
    ledger, net = Ledger(), Counting()
    fit(net, AdaHessianCallback(batch_fraction=0.5), logger=ledger, log_every_n_steps=1)
    assert net.steps == len(net.losses) == STEPS
    assert net.kept == {"train": list(range(STEPS))}
    torch.testing.assert_close(net.share, torch.ones(()))
    assert [entry["directly"] for entry in ledger.entries if "directly" in entry] == list(range(STEPS))
    (at_the_end,) = [entry for entry in ledger.entries if "count" in entry]
    assert at_the_end["count"] == STEPS
    assert not any("loss of 8" in name for entry in ledger.entries for name in entry)
    assert net.scores["accuracy"].update_count == STEPS
    assert int(net.scores["accuracy"].tp.sum() + net.scores["accuracy"].fn.sum()) == STEPS * 16
    assert "log" not in vars(net)


# Checkpoints and validation ---------------------------------------------------------------------------------------


def test_resumes_from_a_checkpoint_bit_by_bit(tmp_path):
    """Seven steps an epoch, a measurement at every fourth: the checkpoint is in the middle of an interval."""

    def made():
        net = Net({**SETTINGS, "update_every": 4}, total_steps=3 * STEPS)
        net.layers[3].p = 0.0  # Lightning's checkpoints do not keep the state of random generators
        return net

    straight = fit(made(), AdaHessianCallback(), max_epochs=3)
    first = trainer(AdaHessianCallback())
    first.fit(made(), Batches(batches()))
    first.save_checkpoint(tmp_path / "epoch.ckpt")
    resumed = made()
    second = trainer(AdaHessianCallback(), max_epochs=3)
    second.fit(resumed, Batches(batches()), ckpt_path=tmp_path / "epoch.ckpt")
    assert second.global_step == 3 * STEPS
    assert_same(resumed, straight)


def test_validation_in_between_changes_nothing():
    class Validated(Net):
        def validation_step(self, batch, batch_idx):
            self.log("validation", self.loss(batch))

    nets = [Validated({**SETTINGS, "update_every": 2}) for _ in range(2)]
    torch.manual_seed(2)
    validating = trainer(AdaHessianCallback(), val_check_interval=3, num_sanity_val_steps=1)
    validating.fit(nets[0], Batches(batches()), Batches(batches(2)))
    assert "validation" in validating.logged_metrics
    loop(nets[1], batches())
    assert_same(*nets)


# Manual optimisation ----------------------------------------------------------------------------------------------


def test_manual_optimisation_measures_by_hand():
    class Manual(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.curvature = AdaHessianCallback(Net.loss)

        def configure_callbacks(self):
            return [self.curvature]

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            assert self.curvature.measure(batch)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()

    precision = {"precision": "bf16-mixed"}
    autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    assert_same(fit(Manual(), **precision), loop(Net(), batches(), clip=0.05, autocast=autocast))


class Duel(L.LightningModule):
    """Two AdaHessians, each with a loss of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(5, 5), nn.Linear(5, 1)
        self.curvatures = [
            AdaHessianCallback(Duel.loss_of_maker, optimizer=0),
            AdaHessianCallback(Duel.loss_of_judge, optimizer=1),
        ]

    def loss_of_maker(self, batch):
        return -self.judge(self.maker(batch[0]).tanh()).tanh().mean()

    def loss_of_judge(self, batch):
        return self.judge(self.maker(batch[0]).tanh()).sigmoid().mean() - self.judge(batch[0]).sigmoid().mean()

    def configure_callbacks(self):
        return self.curvatures

    def configure_optimizers(self):
        return [AdaHessian(part.parameters(), **SETTINGS) for part in (self.maker, self.judge)]

    def training_step(self, batch, batch_idx):
        losses = (self.loss_of_maker, self.loss_of_judge)
        for optimizer, curvature, loss in zip(self.optimizers(), self.curvatures, losses, strict=True):
            curvature.measure(batch)
            optimizer.zero_grad()
            self.manual_backward(loss(batch))
            optimizer.step()


def test_each_of_several_optimizers_has_its_own_curvature():
    net, expected = fit(Duel()), Duel()
    optimizers = expected.configure_optimizers()
    losses = (Duel.loss_of_maker, Duel.loss_of_judge)
    curvatures = [Curvature(expected, *each) for each in zip(losses, optimizers, strict=True)]
    for batch in batches():
        for optimizer, curvature, loss in zip(optimizers, curvatures, losses, strict=True):
            curvature.measure(batch)
            optimizer.zero_grad()
            loss(expected, batch).backward()
            optimizer.step()
    assert_same(net, expected)


# Errors -----------------------------------------------------------------------------------------------------------


def test_says_what_to_do_without_an_adahessian():
    class WithAdam(PlainNet):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    with pytest.raises(ValueError, match=r"no AdaHessian among the optimizers \(Adam\): return one"):
        fit(WithAdam(), AdaHessianCallback())
    with pytest.raises(ValueError, match="no AdaHessian at place 1"):
        fit(PlainNet(), AdaHessianCallback(optimizer=1))


def test_says_what_to_do_with_several():
    net = Duel()
    net.curvatures = [AdaHessianCallback(Duel.loss_of_judge)]
    with pytest.raises(ValueError, match="a callback of its own"):
        fit(net)


def test_says_what_to_do_when_training_step_takes_steps_of_its_own():
    net = PlainNet()
    net.automatic_optimization = False
    with pytest.raises(ValueError, match=r"AdaHessianCallback\(loss_fn\)"):
        fit(net, AdaHessianCallback())


def test_says_what_to_do_when_training_step_fetches_batches_itself():
    class Fetching(PlainNet):
        def training_step(self, dataloader_iter):
            return self.loss(next(dataloader_iter)[0])

    with pytest.warns(UserWarning, match="dragons"), pytest.raises(ValueError, match="optimize manually"):
        fit(Fetching(), AdaHessianCallback())


def test_says_what_to_do_outside_of_a_fit():
    callback = AdaHessianCallback()
    fit(PlainNet(), callback)
    with pytest.raises(RuntimeError, match="configure_callbacks"):
        callback.measure(batches()[0])


def test_names_the_extra_when_lightning_is_missing(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "adahessian.integrations.lightning")
    with pytest.raises(ImportError, match=r'pip install "adahessian\[lightning\]"'):
        import adahessian.integrations.lightning  # noqa: F401


def test_the_library_of_the_other_name_is_taken_where_it_is_in_use(monkeypatch):
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    monkeypatch.delitem(sys.modules, "adahessian.integrations.lightning")
    monkeypatch.setattr(adahessian.integrations, "lightning", None)
    other = pytest.importorskip("pytorch_lightning")
    from adahessian.integrations.lightning import AdaHessianCallback as OtherCallback

    class OtherNet(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = PlainNet().layers

        def training_step(self, batch, batch_idx):
            return PlainNet.loss(self, batch)

        def configure_optimizers(self):
            return AdaHessian(self.parameters(), **SETTINGS)

    net = OtherNet()
    trainer(OtherCallback(), library=other).fit(net, Batches(batches()))
    assert_same(net, loop(PlainNet(), batches()))


# Processes of their own -------------------------------------------------------------------------------------------


def run(*command, folder, seconds=300):
    """What a command of Python prints, run in a folder that is not the repository."""
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


class OneOfTwo(PlainNet):
    """Trains on its rank's half of each batch, and keeps what becomes of it."""

    def train_dataloader(self):
        return Batches([tuple(t.chunk(2)[self.global_rank] for t in batch) for batch in batches(dtype=torch.float64)])

    def on_train_end(self):
        torch.save(self.state_dict(), f"rank{self.global_rank}.pt")


class WithoutALoss(OneOfTwo):
    def training_step(self, batch, batch_idx):
        return None if self.global_rank == 1 and batch_idx == 2 else self.loss(batch)


def train_on_two_ranks(net):
    strategy = DDPStrategy(process_group_backend="gloo", start_method="fork")
    trainer(AdaHessianCallback(), devices=2, strategy=strategy).fit(net.double())


def on_two_ranks():
    train_on_two_ranks(OneOfTwo())
    with pytest.raises(Exception, match="training_step returned no loss"):
        train_on_two_ranks(WithoutALoss())


def test_two_ranks_are_one_process_on_the_whole_batch(tmp_path):
    run("-c", "import test_lightning; test_lightning.on_two_ranks()", folder=tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    whole = loop(PlainNet().double(), batches(dtype=torch.float64))
    torch.testing.assert_close(first, whole.state_dict(), rtol=1e-9, atol=1e-12)


def test_the_example_runs_as_written(tmp_path):
    printed = run(REPOSITORY / "examples" / "lightning_digits.py", "--epochs", 1, folder=tmp_path)
    accuracy = float(printed.split("accuracy")[-1].split()[0].strip("%:"))
    assert 50 < accuracy <= 100
