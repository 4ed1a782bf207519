"""The training loop of all commands."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from adahessian.lab.configs.run import Run, Session, as_json
from adahessian.lab.errors import CheckpointError, ConfigError, StoppedError
from adahessian.lab.results.run_file import RunFiles, RunResult
from adahessian.lab.tasks import load_task
from adahessian.lab.tasks.task import Env
from adahessian.lab.training import checkpoint, distributed
from adahessian.lab.training.atomic_files import write_json
from adahessian.lab.training.distributed import rank, world_size
from adahessian.lab.training.final_weights import FinalWeights
from adahessian.lab.training.identity import changed, effective_precision, identity
from adahessian.lab.training.optimizers import build_optimizer, set_precision
from adahessian.lab.training.progress import Progress
from adahessian.lab.training.provenance import provenance
from adahessian.lab.training.schedules import Schedule
from adahessian.lab.training.steps import is_compiled, make_step

__all__ = ["StoppedError", "Trainer"]

# Reading a loss waits for the device, so it is done only after so many seconds.
_READ_LOSS_EVERY = 1.0
# To agree on stopping, ranks wait for each other, so they do it only after so many steps.
_AGREE_EVERY = 20


@dataclass
class _State:
    """Plain values that a checkpoint holds."""

    step: int = 0
    seconds: float = 0.0
    """Time spent in steps, without evaluations and checkpoints."""

    records: list[dict[str, float]] = field(default_factory=list)
    """One record per evaluation."""

    step_ms: list[float] = field(default_factory=list)
    """Mean step time between evaluations, without each session's first interval, which compiles."""

    diverged: bool = False
    peak_bytes: int = 0
    exclusive: bool = True
    provenance: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """One run, from its start or from its checkpoint to its end.

    Args:
        run: What to train.
        session: Where and how.
        device: This rank's device.
        progress: Shows and logs how the run proceeds.
        stop_requested: Returns whether a signal asked to stop.
        selection: Trials and the metric that chose the configuration, if a sweep did.

    Raises:
        ConfigError: If the optimizer or the batch size does not fit the task.
        DataError: If data is missing or damaged.
        CheckpointError: If the checkpoint cannot be read or belongs to another run.
    """

    def __init__(
        self,
        run: Run,
        session: Session,
        *,
        device: torch.device,
        progress: Progress,
        stop_requested: Callable[[], bool] = lambda: False,
        selection: dict[str, Any] | None = None,
    ) -> None:
        self.run, self.config, self.session, self.device = run, run.config, session, device
        self.progress, self.stop_requested, self.selection = progress, stop_requested, selection
        self.files = RunFiles(output=session.output, task=run.task, label=run.label, seed=run.seed)
        self.precision = effective_precision(session, device)
        config = self.config

        torch.manual_seed(run.seed)
        env = Env(data_dir=session.data_dir, device=device, seed=run.seed, rank=rank(), world_size=world_size())
        self.task = load_task(config, env)
        self.steps_per_epoch = self.task.steps_per_epoch
        if self.steps_per_epoch < 1:
            raise ConfigError(f"--batch-size {config.task.batch_size} exceeds the training data. Choose a smaller one.")
        self.total_steps = config.steps or config.epochs * self.steps_per_epoch
        if device.type == "cuda":
            set_precision(self.precision)
            torch.backends.cudnn.benchmark = True  # shapes repeat, so trying all algorithms once pays off
            torch.cuda.reset_peak_memory_stats(device)
        self.model = self.task.build_model()
        replica = distributed.replicate(self.model)
        torch.manual_seed(run.seed + rank())  # dropout differs between ranks

        embedding_lr = getattr(config.task, "embedding_lr", None)
        self.optimizer = build_optimizer(config.optimizer, self.model, seed=run.seed, embedding_lr=embedding_lr)
        self.schedule = Schedule(
            self.optimizer,
            config.schedule,
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
            higher_is_better=config.task.validation_metric.higher_is_better,
        )
        compiled = device.type == "cuda" if session.compile is None else session.compile
        self.take_step = make_step(replica, self._loss, self.optimizer, config.optimizer, compiled=compiled)
        self.conditions = {
            "device": device.type,
            "precision": self.precision,
            "compiled": is_compiled(self.take_step),
            "mode": self.take_step.mode,
            "processes": world_size(),
        }
        self.final_weights = FinalWeights(config, self.total_steps, self.steps_per_epoch)

        self.state = _State(exclusive=session.exclusive)
        self.loss_sum = torch.zeros((), device=device)
        self.identity = identity(run, self.precision, world_size())
        self.parameters = sum(param.numel() for param in self.model.parameters())
        # Everything is loaded. A run that cannot start has deleted nothing.
        if session.overwrite and rank() == 0:
            self.files.result.unlink(missing_ok=True)
            self.files.checkpoint.unlink(missing_ok=True)
        elif not session.overwrite and self.files.checkpoint.exists():
            self._resume()
        self.state.provenance.append(provenance(run.seed))
        self.stop_at = self._planned_stop()
        self.steps_in_session = 0
        self.is_warm = False

    def train(self) -> RunResult:
        """Train to the end, and write the result.

        Raises:
            StoppedError: If a signal or the session stopped the run before its end.
        """
        state = self.state
        self.progress.start(state.records, state.step, self.total_steps, self.parameters, self.conditions)
        self.model.train()
        self.clock = self.last_read = self.last_save = time.perf_counter()
        while not self.is_over:
            epoch, steps_in_epoch = divmod(state.step, self.steps_per_epoch)
            for batch in self.task.batches(epoch, skip=steps_in_epoch):
                loss = self.take_step(batch)
                self.schedule.step()
                self._count(loss)
                is_evaluated, is_stopping = self._is_evaluation_due(), self._is_stop_due()
                if is_evaluated:
                    self._evaluate()
                if is_evaluated or is_stopping or self._is_checkpoint_due():
                    self._save()
                if self.is_over:
                    break
                if is_stopping:
                    raise self._stopped()
            if not self.is_over and state.step % self.steps_per_epoch:
                count = self.steps_per_epoch
                raise ConfigError(f"steps_per_epoch is {count}, but batches() yields another number. Correct the task.")
        return self._finish()

    @property
    def is_over(self) -> bool:
        """Whether the last step is done, or the loss is not finite any more."""
        return self.state.diverged or self.state.step >= self.total_steps

    # Parts of the loop ------------------------------------------------------------------------------------------------

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.precision != "bfloat16":
            return self.task.loss(model, batch)
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.task.loss(model, batch)

    def _count(self, loss: Tensor) -> None:
        self.state.step += 1
        self.steps_in_session += 1
        self.loss_sum = self.loss_sum + loss  # not in place: float64 losses are summed in float64
        self.final_weights.after_step(self.model, self.state.step)
        if self.steps_in_session == 1:
            with self._clock_stopped():  # this step may have compiled
                self.seconds_before = self.state.seconds
        now = time.perf_counter()
        if now - self.last_read > _READ_LOSS_EVERY:
            self.last_read = now
            self.progress.step(self.state.step, loss.item(), self._lr())

    def _is_evaluation_due(self) -> bool:
        every = self.config.eval_every or self.steps_per_epoch
        return self.state.step % every == 0 or self.state.step == self.total_steps

    def _is_stop_due(self) -> bool:
        return self.state.step == self.stop_at or self._any_rank(self.stop_requested())

    def _is_checkpoint_due(self) -> bool:
        return self._any_rank(time.perf_counter() - self.last_save > 60 * self.session.checkpoint_minutes)

    def _any_rank(self, flag: bool) -> bool:
        may_ask = world_size() == 1 or self.state.step % _AGREE_EVERY == 0
        return may_ask and distributed.any_rank(flag, self.device)

    def _evaluate(self) -> None:
        state = self.state
        before = state.records[-1] if state.records else {"step": 0, "seconds": 0.0}
        with self._clock_stopped():
            steps = state.step - int(before["step"])
            record = {
                "step": state.step,
                "epoch": state.step / self.steps_per_epoch,
                "seconds": round(state.seconds, 6),
                "lr": self._lr(),  # of the next step
                "train_loss": distributed.all_reduce_sum(self.loss_sum).item() / (world_size() * steps),
            }
            self.loss_sum = torch.zeros((), device=self.device)
            if self.is_warm:
                state.step_ms.append(1e3 * (state.seconds - before["seconds"]) / steps)
            self.is_warm = True
            state.diverged = not math.isfinite(record["train_loss"])
            if not state.diverged:
                record |= self._metrics()
                metric = record[self.config.task.validation_metric.name]
                self.schedule.evaluated(metric)
                self.final_weights.after_evaluation(self.model, metric)
            state.records.append(record)
            self.progress.evaluated(record)

    def _metrics(self, *, final: bool = False) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad():
            metrics = self.task.evaluate(self.model, final=final)
        self.model.train()
        return distributed.broadcast_metrics(metrics, self.device)

    def _finish(self) -> RunResult:
        """Test the final weights, and write them and the result."""
        state, final = self.state, {}
        if not state.diverged:
            self.final_weights.load_into(self.model)
            final = self._metrics(final=True)
        columns = dict.fromkeys(name for record in state.records for name in record)
        result = RunResult(
            task=self.run.task,
            optimizer=self.run.optimizer,
            label=self.run.label,
            seed=self.run.seed,
            status="diverged" if state.diverged else "finished",
            config=as_json(self.config),
            conditions=self.conditions,
            curve={name: [record.get(name, math.nan) for record in state.records] for name in columns},
            final=final,
            cost={
                "exclusive": state.exclusive,
                "step_ms": round(median(state.step_ms), 4) if state.step_ms else None,
                "peak_mib": round(self._peak_bytes() / 2**20, 1) if self.device.type == "cuda" else None,
                "parameters": self.parameters,
            },
            selection=self.selection,
            provenance=state.provenance,
        )
        if rank() == 0:
            if not state.diverged:
                checkpoint.save_checkpoint(self.files.weights, checkpoint.weights_of(self.model))
            write_json(self.files.result, result.to_json())
            self.files.checkpoint.unlink(missing_ok=True)
        return result

    # Stopping and resuming --------------------------------------------------------------------------------------------

    def _save(self) -> None:
        with self._clock_stopped():
            random = distributed.all_gather(checkpoint.random_states(self.device), self.device)
            loss_sums = distributed.all_gather({"loss_sum": self.loss_sum}, self.device)
            self.state.peak_bytes = self._peak_bytes()
            content = {
                "identity": self.identity,
                "steps_per_epoch": self.steps_per_epoch,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "final_weights": self.final_weights.state_dict(),
                "random": random,
                "loss_sums": [of_rank["loss_sum"] for of_rank in loss_sums],
                "state": asdict(self.state),
            }
            if rank() == 0:
                checkpoint.save_checkpoint(self.files.checkpoint, content)
        self.last_save = time.perf_counter()

    def _resume(self) -> None:
        path = self.files.checkpoint
        saved = checkpoint.load_checkpoint(path, self.device)
        if names := changed(saved["identity"], self.identity):
            raise CheckpointError(f"{path} belongs to a run with other values of {names}. Choose another --name.")
        if saved["steps_per_epoch"] != self.steps_per_epoch:
            raise CheckpointError(
                f"{path} was written for {saved['steps_per_epoch']:,} steps per epoch, but the data in --data-dir "
                f"{self.session.data_dir} has {self.steps_per_epoch:,}. Restore that data, or choose another --name."
            )
        for name in ("model", "optimizer", "schedule", "final_weights"):
            getattr(self, name).load_state_dict(saved[name])
        checkpoint.set_random_states(saved["random"][rank()], self.device)
        self.loss_sum = saved["loss_sums"][rank()].to(self.device)
        self.state = _State(**saved["state"])
        self.state.exclusive = self.state.exclusive and self.session.exclusive

    def _planned_stop(self) -> int | None:
        epochs, steps = self.session.stop_after_epochs, self.session.stop_after_steps
        ends = [self.state.step + steps] if steps else []
        ends += [(self.state.step // self.steps_per_epoch + epochs) * self.steps_per_epoch] if epochs else []
        return min(ends, default=None)

    def _stopped(self) -> StoppedError:
        state, message = self.state, f"Stopped after step {self.state.step:,} of {self.total_steps:,}"
        if steps := state.step - int(state.records[-1]["step"] if state.records else 0):
            message += f", mean loss {self.loss_sum.item() / steps:.4f}"
        if self.steps_in_session > 1:
            step_ms = 1e3 * (state.seconds - self.seconds_before) / (self.steps_in_session - 1)
            message += f", {step_ms:.2f} ms per step"
        return StoppedError(f"{message}.", planned=state.step == self.stop_at)

    # Small things -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _clock_stopped(self) -> Iterator[None]:
        """Leave the time inside out of the time of training."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.state.seconds += time.perf_counter() - self.clock
        yield
        self.clock = time.perf_counter()

    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _peak_bytes(self) -> int:
        """Return the largest memory use on the device, in this session and before. It is 0 on a CPU."""
        now = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        return max(now, self.state.peak_bytes)
