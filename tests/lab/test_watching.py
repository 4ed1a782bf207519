import io
from types import SimpleNamespace

from rich.console import Console

from adahessian.lab.tasks.images import EXPERIMENTS
from adahessian.lab.watching import LiveWatcher


def test_an_epoch_in_a_log_has_the_metric_and_what_is_live_beside_it(tmp_path):
    experiment = next(experiment for experiment in EXPERIMENTS if experiment.name == "cifar10-resnet20")
    plan = SimpleNamespace(
        experiment=experiment,
        settings=experiment.defaults["adahessian"],
        optimizer="adahessian",
        seed=1,
        device="cpu",
        precision="float32",
        compiled=False,
        files=SimpleNamespace(name="adahessian", tensorboard=tmp_path),
    )
    text = io.StringIO()
    record = {"epoch": 160, "step": 320, "train_loss": 0.25, "lr": 0.15, "test_accuracy": 73.8}
    with LiveWatcher(Console(file=text, width=200)) as watcher:
        watcher.start(plan, steps_per_epoch=2, steps_done=0, parameters=5)
        watcher.step(step=320, loss=0.5, lr=0.15)
        watcher.epoch(record | {"test_accuracy_recomputed": 79.64, "test_loss": 0.7})
        watcher.epoch(record)
        watcher.epoch({name: value for name, value in record.items() if name != "test_accuracy"})
    _, with_both, with_one, diverged = text.getvalue().splitlines()
    assert "epoch 160/160  loss 0.2500  test accuracy 73.80% with recomputed statistics 79.64%  lr 0.15" in with_both
    assert "loss 0.2500  test accuracy 73.80%  lr 0.15" in with_one
    assert "loss 0.2500  lr 0.15" in diverged
