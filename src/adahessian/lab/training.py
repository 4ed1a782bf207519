"""The loop that trains every task."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from adahessian.lab.checkpoints import (
    CheckpointError,
    load_checkpoint,
    random_states,
    save_checkpoint,
    set_random_states,
    weights_of,
)
from adahessian.lab.files import write_json, written_whole
from adahessian.lab.interruption import Interruption
from adahessian.lab.optimizers import make_optimizer, set_precision
from adahessian.lab.processes import added_up, any_of_us, as_the_first_has_it, from_all, processes, wrapped
from adahessian.lab.provenance import provenance
from adahessian.lab.runs import Result, RunFiles, differences, finite, identity
from adahessian.lab.schedules import Schedule
from adahessian.lab.settings import OptimizerName, Settings, SettingsError
from adahessian.lab.stepping import is_compiled, make_step
from adahessian.lab.tasks.task import Experiment, Place, Share, Task

Precision = Literal["float32", "tf32", "bfloat16"]

# Seconds between two looks at the loss, which wait for the device.
_LOOK_EVERY = 1.0
# With several processes all must agree to stop, which waits for them: not at every step.
_AGREE_EVERY = 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that makes a run."""

    experiment: Experiment[Any]
    optimizer: OptimizerName
    settings: Settings
    seed: int
    data_dir: Path
    device: torch.device
    precision: Precision
    compiled: bool
    shared: bool
    """Whether other programs use the device meanwhile, so that times mean little."""

    files: RunFiles
    checkpoint_minutes: float
    stop_after_epochs: int | None = None
    """Ends the session, not the run, after so many epochs: the schedule stays that of the whole run."""

    stop_after_steps: int | None = None
    """The same after so many steps."""

    overwrite: bool = False
    """Whether the run begins anew, whatever there is of it."""

    def identity(self, processes: int) -> dict[str, Any]:
        """What makes the run this one and no other."""
        return identity(
            task=self.experiment.name,
            optimizer=self.optimizer,
            seed=self.seed,
            settings=asdict(self.settings),
            precision=self.precision,
            processes=processes,
        )


class Watcher(Protocol):
    """Sees how a run is getting on."""

    def start(self, plan: Plan, *, steps_per_epoch: int, steps_done: int, parameters: int) -> None:
        """The data is loaded and the model made."""

    def step(self, *, step: int, loss: float | None, lr: float) -> None:
        """A step has been taken; its loss, if anybody looked."""

    def epoch(self, record: dict[str, float]) -> None:
        """An epoch is over."""

    def stopping(self) -> None:
        """Somebody has asked to stop, and the current step is to be the last."""


class StoppedError(Exception):
    """A run that was stopped before its end. Its checkpoint is written.

    Args:
        where: After which epoch, or in which.
        as_planned: Whether the plan said so, and no signal.
    """

    def __init__(self, where: str, *, as_planned: bool) -> None:
        super().__init__(where)
        self.as_planned = as_planned


def per_step(seconds: float) -> str:
    """The time of a step, for people."""
    return f"{seconds:.1f} s/step" if seconds >= 1 else f"{1e3 * seconds:.1f} ms/step"


def train(plan: Plan, watcher: Watcher) -> Result:
    """Train from the start, or from the checkpoint if there is one, to the end.

    Args:
        plan: What to do.
        watcher: Whom to tell.

    Raises:
        StoppedError: If the run was interrupted, by a signal or by ``plan.stop_after_epochs``.
        DataError: If the data is not as it should be.
        SettingsError: If it does not fill a batch.
        CheckpointError: If the checkpoint cannot be read, or is another run's.
    """
    with Interruption(watcher.stopping) as interruption, processes(plan.device) as (share, device):
        return _Run(plan, share, device, watcher).train(lambda: interruption.asked)


class _Run:
    """A run in its process."""

    def __init__(self, plan: Plan, share: Share, device: torch.device, watcher: Watcher) -> None:
        self.plan, self.settings = plan, plan.settings
        self.share, self.device = share, device
        self.watcher = watcher
        self.writes = share.rank == 0

        torch.manual_seed(plan.seed)
        place = Place(data_dir=plan.data_dir, device=device, seed=plan.seed, share=share)
        self.task: Task[Any] = plan.experiment.load(plan.settings, place)
        self.steps_per_epoch = self.task.steps_per_epoch
        if self.steps_per_epoch < 1:
            raise SettingsError(
                f"--batch-size {plan.settings.batch_size}: the data does not fill a single batch: choose a smaller one"
            )
        if device.type == "cuda":
            set_precision(plan.precision)
            # Batches of one shape come thousands of times, which repays trying all algorithms for them.
            torch.backends.cudnn.benchmark = True
            torch.cuda.reset_peak_memory_stats(device)
        self.bare_model = self.task.make_model()
        self.model = wrapped(self.bare_model, share)
        # Dropout differs from rank to rank.
        torch.manual_seed(plan.seed + share.rank)

        self.optimizer = make_optimizer(
            plan.optimizer, self.model, plan.settings, seed=plan.seed, steps_per_epoch=self.steps_per_epoch
        )
        self.schedule = Schedule(
            self.optimizer,
            plan.settings,
            steps_per_epoch=self.steps_per_epoch,
            higher_is_better=plan.experiment.curve.higher_is_better,
        )
        self.step = make_step(self.model, self.loss, self.optimizer, plan.settings, compiled=plan.compiled)

        self.epochs_done = 0
        self.steps_in_epoch = 0
        self.loss_sum = torch.zeros((), device=device)
        self.seconds = 0.0
        self.records: list[dict[str, float]] = []
        self.kept: list[dict[str, Tensor]] = []
        self.earlier_peak_bytes = 0
        self.steps_in_session = 0
        self.shared = plan.shared
        self.history = [provenance(seed=plan.seed)]
        self.diverged = False
        if plan.overwrite:
            # Not before all is loaded: an earlier run is worth more than one that cannot begin.
            if self.writes:
                plan.files.result.unlink(missing_ok=True)
                plan.files.checkpoint.unlink(missing_ok=True)
        elif plan.files.checkpoint.exists():
            self._resume()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The task's loss, in the precision that was asked for."""
        if self.plan.precision != "bfloat16":
            return self.task.loss(model, batch)
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.task.loss(model, batch)

    def train(self, stop_asked: Callable[[], bool]) -> Result:
        """Epoch after epoch, to the end."""
        plan = self.plan
        last_epoch = min(self.settings.epochs, self.epochs_done + (plan.stop_after_epochs or self.settings.epochs))
        self._open_log()
        self.watcher.start(
            plan,
            steps_per_epoch=self.steps_per_epoch,
            steps_done=self.steps_done,
            parameters=sum(param.numel() for param in self.model.parameters()),
        )
        while self.epochs_done < last_epoch and not self.diverged:
            self._train_epoch(stop_asked)
            self._evaluate()
            self._save()
            if self.epochs_done < self.settings.epochs and any_of_us(stop_asked(), self.share, self.device):
                raise StoppedError(f"after epoch {self.epochs_done} of {self.settings.epochs}", as_planned=False)
        if self.epochs_done < self.settings.epochs and not self.diverged:
            raise StoppedError(f"after epoch {self.epochs_done} of {self.settings.epochs}", as_planned=True)
        return self._finish()

    @property
    def steps_done(self) -> int:
        """Steps since the start of the run."""
        return self.epochs_done * self.steps_per_epoch + self.steps_in_epoch

    # The loop --------------------------------------------------------------------------------------------------------

    def _train_epoch(self, stop_asked: Callable[[], bool]) -> None:
        self.model.train()
        began = started = looked = saved = time.perf_counter()
        before = self.steps_in_session
        for batch in self.task.batches(self.epochs_done, self.steps_in_epoch):
            loss = self.step(batch)
            self.schedule.step()
            self.loss_sum += loss
            self.steps_in_epoch += 1
            self.steps_in_session += 1

            if self.steps_in_session == 1:
                # It compiles, and is no measure of those that follow.
                self._wait()
                began, before = time.perf_counter(), 1
            now = time.perf_counter()
            look = now - looked > _LOOK_EVERY
            looked = now if look else looked
            self.watcher.step(step=self.steps_done, loss=loss.item() if look else None, lr=self._lr())
            enough = self.steps_in_session == self.plan.stop_after_steps
            if self.share.ranks == 1 or enough or self.steps_done % _AGREE_EVERY == 0:
                stop = any_of_us(stop_asked(), self.share, self.device) or enough
                due = any_of_us(now - saved > 60 * self.plan.checkpoint_minutes, self.share, self.device)
                if stop or due:
                    self._wait()
                    waited = time.perf_counter()
                    self.seconds += waited - started
                    self._save()
                    started = saved = time.perf_counter()
                if stop:
                    where = f"in epoch {self.epochs_done + 1} of {self.settings.epochs}, after step {self.steps_done:,}"
                    mean_loss = self.loss_sum.item() / self.steps_in_epoch
                    where += f": mean loss {mean_loss:.4f}"
                    if self.steps_in_session > before:
                        where += f", {per_step((waited - began) / (self.steps_in_session - before))}"
                    raise StoppedError(where, as_planned=enough)
        self._wait()
        self.seconds += time.perf_counter() - started

    def _evaluate(self) -> None:
        """End an epoch: its record, and the weights that may be needed in the end."""
        # As the next step would have it, the learning rate has changed already.
        record = {
            "epoch": self.epochs_done + 1,
            "step": self.steps_done,
            "train_loss": added_up(self.loss_sum, self.share).item() / (self.share.ranks * self.steps_in_epoch),
            "lr": self._lr(),
            "seconds": self.seconds,
        }
        self.diverged = not math.isfinite(record["train_loss"])
        if not self.diverged:
            self.bare_model.eval()
            with torch.no_grad():
                record |= as_the_first_has_it(self.task.evaluate(self.bare_model), self.share, self.device)
            self.bare_model.train()
            curve = self.plan.experiment.curve
            self.schedule.after_epoch(record[curve.name])
            self._keep_weights(record[curve.name])
        self.records.append(record)
        self.epochs_done += 1
        self.steps_in_epoch = 0
        self.loss_sum.zero_()
        if self.writes:
            with self.plan.files.log.open("a") as log:
                log.write(json.dumps(finite(record)) + "\n")
            self.watcher.epoch(record)

    def _keep_weights(self, result: float) -> None:
        """Keep what the final weights are made of, besides the last ones."""
        curve = self.plan.experiment.curve
        if self.task.final_weights == "best":
            sign = 1 if curve.higher_is_better else -1
            earlier = (sign * record.get(curve.name, math.nan) for record in self.records)
            if sign * result > max(filter(math.isfinite, earlier), default=-math.inf) or not self.kept:
                self.kept = [weights_of(self.bare_model)]
        elif self.task.final_weights == "average":
            count = int(getattr(self.settings, "average_epochs", 1))
            if self.epochs_done + 1 > self.settings.epochs - count:
                self.kept = [*self.kept, weights_of(self.bare_model)][-count:]

    def _finish(self) -> Result:
        """Test the final weights, and write what is kept of the run."""
        plan = self.plan
        final: dict[str, float] = {}
        if not self.diverged:
            if self.kept:
                self.bare_model.load_state_dict(_mean(self.kept))
            self.bare_model.eval()
            with torch.no_grad():
                final = self.task.test(self.bare_model)
        result = Result(
            task=plan.experiment.name,
            name=plan.files.name,
            optimizer=plan.optimizer,
            seed=plan.seed,
            settings=asdict(plan.settings),
            conditions={
                "device": self.device.type,
                "precision": plan.precision,
                "compiled": is_compiled(self.step),
                "processes": self.share.ranks,
            },
            shared=self.shared,
            epochs=self.records,
            final=final,
            diverged=self.diverged,
            parameters=sum(param.numel() for param in self.bare_model.parameters()),
            peak_bytes=self._peak_bytes() or None,
            provenance=self.history,
        )
        if self.writes:
            if not self.diverged:
                save_checkpoint(plan.files.weights, weights_of(self.bare_model))
            write_json(plan.files.result, result.to_json())
            with suppress(FileNotFoundError):
                plan.files.checkpoint.unlink()
        return result

    # What is kept ----------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        random = from_all(random_states(self.device), self.share, self.device)
        loss_sums = from_all({"loss_sum": self.loss_sum}, self.share, self.device)
        if not self.writes:
            return
        content = {
            "identity": self.plan.identity(self.share.ranks),
            "model": self.bare_model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": random,
            "epochs_done": self.epochs_done,
            "steps_per_epoch": self.steps_per_epoch,
            "steps_in_epoch": self.steps_in_epoch,
            "loss_sum": torch.stack([of_rank["loss_sum"] for of_rank in loss_sums]),
            "seconds": self.seconds,
            "records": self.records,
            "kept": self.kept,
            "history": self.history,
            "peak_bytes": self._peak_bytes(),
            "shared": self.shared,
            "diverged": self.diverged,
        }
        save_checkpoint(self.plan.files.checkpoint, content)

    def _resume(self) -> None:
        path = self.plan.files.checkpoint
        try:
            saved = load_checkpoint(path, device=self.device)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Restore it from a copy, or begin anew with --overwrite") from error
        if differing := differences(saved["identity"], self.plan.identity(self.share.ranks)):
            raise CheckpointError(f"{path} is another run's: it differs in {differing}. Choose another --name.")
        if saved["steps_per_epoch"] != self.steps_per_epoch:
            raise CheckpointError(
                f"{path} was begun on other data: an epoch of it has {saved['steps_per_epoch']:,} steps, one of the "
                f"data in {self.plan.data_dir} {self.steps_per_epoch:,}"
            )
        self.bare_model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        set_random_states(saved["random"][self.share.rank], self.device)
        self.epochs_done, self.steps_in_epoch = saved["epochs_done"], saved["steps_in_epoch"]
        # Checkpoints of one process used to have a single number here.
        self.loss_sum.copy_(saved["loss_sum"].flatten()[self.share.rank])
        self.seconds = saved["seconds"]
        self.records, self.kept = saved["records"], saved["kept"]
        self.history = [*saved["history"], *self.history]
        self.earlier_peak_bytes = saved["peak_bytes"]
        self.shared = self.shared or saved["shared"]
        self.diverged = saved["diverged"]

    def _open_log(self) -> None:
        if self.writes:
            lines = "".join(json.dumps(finite(record)) + "\n" for record in self.records)
            with written_whole(self.plan.files.log) as log:
                log.write(lines.encode())

    def _peak_bytes(self) -> int:
        """The most memory that the run has taken on the device, in this session and before; 0 on a CPU."""
        now = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        return max(now, self.earlier_peak_bytes)

    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _mean(of_epochs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of weights; of what is counted, the last."""
    return {
        name: torch.stack([weights[name] for weights in of_epochs]).mean(0) if last.is_floating_point() else last
        for name, last in of_epochs[-1].items()
    }
