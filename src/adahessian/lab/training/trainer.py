"""The training loop of all commands."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from adahessian.lab.configs.run import Run, Session
from adahessian.lab.errors import CheckpointError, ConfigError, StoppedError
from adahessian.lab.results.run_file import RunFiles, RunResult
from adahessian.lab.tasks.task import Env, load_task
from adahessian.lab.training import checkpoint, distributed
from adahessian.lab.training.atomic_files import write_json
from adahessian.lab.training.checkpoint import FinalWeights
from adahessian.lab.training.distributed import rank, world_size
from adahessian.lab.training.optimizers import build_optimizer, set_precision
from adahessian.lab.training.progress import Progress
from adahessian.lab.training.provenance import provenance
from adahessian.lab.training.schedules import Schedule
from adahessian.lab.training.steps import make_step

# Seconds between reads of the loss, because each read waits for the device.
_READ_LOSS_EVERY = 1.0
# Steps between agreements on stopping, because ranks wait for each other to agree.
_AGREE_EVERY = 20


@dataclass
class _State:
    """Plain values that a checkpoint holds."""

    step: int = 0
    seconds: float = 0.0  # in steps, without evaluations and checkpoints
    records: list[dict[str, float]] = field(default_factory=list)  # one per evaluation
    step_ms: list[float] = field(default_factory=list)  # one per interval, except for a session's first, which compiles
    diverged: bool = False
    peak_bytes: int = 0
    exclusive: bool = True
    provenance: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Trainer:
    """One run, from its start or from its checkpoint to its end."""

    run: Run
    session: Session
    _: KW_ONLY
    device: torch.device  # of this rank
    progress: Progress
    stop_requested: Callable[[], bool]  # by a signal
    fallbacks: Sequence[str] = ()  # messages about steps that are not compiled or not captured as they should be
    selection: dict[str, Any] | None = None  # trials and the metric that chose the configuration, if a sweep did

    def __post_init__(self) -> None:
        """Load the data, the model and, if there is one, the checkpoint."""
        run, session, device = self.run, self.session, self.device
        config, metric = run.config, run.config.task.validation_metric
        self.files = RunFiles(output=session.output, task=run.task, label=run.label, seed=run.seed)
        self.precision = checkpoint.effective_precision(session, device)

        torch.manual_seed(run.seed)
        env = Env(data_dir=session.data_dir, device=device, seed=run.seed, rank=rank(), world_size=world_size())
        self.task = load_task(config, env)
        self.steps_per_epoch = self.task.steps_per_epoch
        if self.steps_per_epoch < 1:
            raise ConfigError(f"--batch-size {config.task.batch_size} exceeds the training data. Choose a smaller one.")
        data = {"--data-dir (steps per epoch)": self.steps_per_epoch}
        self.identity = checkpoint.identity(run, self.precision, world_size()) | data
        self.total_steps = config.steps or config.epochs * self.steps_per_epoch
        self.eval_every = config.eval_every or self.steps_per_epoch
        if device.type == "cuda":
            set_precision(self.precision)
            torch.backends.cudnn.benchmark = True  # shapes repeat, so trying all algorithms once pays off
            torch.cuda.reset_peak_memory_stats(device)
        self.model = self.task.build_model()
        self.kept = None if config.final_weights == "last" else FinalWeights(self.model)
        self.parameters = sum(param.numel() for param in self.model.parameters())
        replica = distributed.replicate(self.model)
        torch.manual_seed(run.seed + rank())  # dropout differs between ranks

        embedding_lr = getattr(config.task, "embedding_lr", 0.01)
        self.optimizer = build_optimizer(config.optimizer, self.model, seed=run.seed, embedding_lr=embedding_lr)
        self.schedule = Schedule(self.optimizer, config.schedule, self.total_steps, self.steps_per_epoch, metric)
        compiled = device.type == "cuda" if session.compile is None else session.compile
        self.take_step, mode = make_step(replica, self._loss, self.optimizer, config.optimizer, compiled=compiled)
        self.conditions = {
            "device": device.type,
            "precision": self.precision,
            "compiled": mode != "eager",
            "mode": mode,
            "processes": world_size(),
        }
        self.stateful: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        self.stateful |= {"kept": self.kept} if self.kept else {}

        self.state = _State(exclusive=session.exclusive)
        self.loss_sum = torch.zeros((), device=device)
        # Everything is loaded by now, so a run that cannot start deletes nothing.
        if session.overwrite and rank() == 0:
            for file in (self.files.result, self.files.checkpoint, self.files.weights):
                file.unlink(missing_ok=True)
        elif not session.overwrite and self.files.checkpoint.exists():
            self._resume()
        self.state.provenance.append(provenance(run.seed))
        epochs, steps = session.stop_after_epochs or math.inf, session.stop_after_steps or math.inf
        epochs_done = self.state.step // self.steps_per_epoch
        self.stop_at = min(self.state.step + steps, (epochs_done + epochs) * self.steps_per_epoch)
        self.is_warm = False

    def train(self) -> RunResult:
        """Train to the end, and write the result. A signal or the end of the session raises StoppedError."""
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
                is_evaluated = state.step % self.eval_every == 0 or state.step == self.total_steps
                is_stopping = state.step == self.stop_at or self._any_rank(self.stop_requested())
                if is_evaluated:
                    self._evaluate()
                is_checkpoint_due = time.perf_counter() - self.last_save > 60 * self.session.checkpoint_minutes
                if is_evaluated or is_stopping or self._any_rank(is_checkpoint_due):
                    self._save()
                if self.is_over:
                    break
                if is_stopping:
                    message = f"Stopped after step {state.step:,} of {self.total_steps:,}."
                    raise StoppedError(message, planned=state.step == self.stop_at)
            if not self.is_over and state.step % self.steps_per_epoch:
                count = self.steps_per_epoch
                raise ConfigError(f"steps_per_epoch is {count}, but batches() yields a different number. Correct it.")
        return self._finish()

    @property
    def is_over(self) -> bool:
        """Whether the last step is done, or the loss is not finite any more."""
        return self.state.diverged or self.state.step >= self.total_steps

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.precision != "bfloat16":
            return self.task.loss(model, batch)
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.task.loss(model, batch)

    def _count(self, loss: Tensor) -> None:
        self.state.step += 1
        self.loss_sum = self.loss_sum + loss  # not in place: float64 losses are summed in float64
        if self.kept and self.run.config.final_weights == "average":
            epochs_left, steps_left = divmod(self.total_steps - self.state.step, self.steps_per_epoch)
            if steps_left == 0 and epochs_left < self.run.config.average_epochs:
                self.kept.update_parameters(self.model)
        now = time.perf_counter()
        if now - self.last_read > _READ_LOSS_EVERY:
            self.last_read = now
            self.progress.step(self.state.step, loss.item(), self.optimizer.param_groups[0]["lr"])

    def _evaluate(self) -> None:
        state, metric = self.state, self.run.config.task.validation_metric
        before = state.records[-1] if state.records else {"step": 0, "seconds": 0.0}
        with self._clock_stopped():
            steps = state.step - int(before["step"])
            record = {
                "step": state.step,
                "epoch": state.step / self.steps_per_epoch,
                "seconds": round(state.seconds, 6),
                "lr": self.optimizer.param_groups[0]["lr"],  # of the next step
                "train_loss": distributed.all_reduce_sum(self.loss_sum).item() / (world_size() * steps),
            }
            self.loss_sum = torch.zeros((), device=self.device)
            if self.is_warm:
                state.step_ms.append(1e3 * (state.seconds - before["seconds"]) / steps)
            self.is_warm = True
            state.diverged = not math.isfinite(record["train_loss"])
            if not state.diverged:
                record |= self._metrics()
                value = record[metric.name]
                self.schedule.evaluated(value)
                if self.kept and self.run.config.final_weights == "best":
                    self.kept.keep_if_best(self.model, value if metric.higher_is_better else -value)
            state.records.append(record)
            self.progress.evaluated(record)

    def _metrics(self, *, final: bool = False) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad():
            metrics: dict[str, float] = distributed.all_gather(self.task.evaluate(self.model, final=final))[0]
        self.model.train()
        return metrics

    def _finish(self) -> RunResult:
        """Test the final weights, and write them and the result."""
        state, final, mode = self.state, {}, self.conditions["mode"]
        if not state.diverged:
            if self.kept:
                self.model.load_state_dict(self.kept.module.state_dict())
            final = self._metrics(final=True)
        columns = dict.fromkeys(name for record in state.records for name in record)
        result = RunResult(
            **asdict(self.run),
            status="diverged" if state.diverged else "finished",
            conditions=self.conditions | ({"mode": "mixed"} if self.fallbacks and mode != "eager" else {}),
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
                checkpoint.save_checkpoint(self.files.weights, self.model.state_dict())
            write_json(self.files.result, result.to_json())
            self.files.checkpoint.unlink(missing_ok=True)
        return result

    def _save(self) -> None:
        with self._clock_stopped():
            self.state.peak_bytes = self._peak_bytes()
            on_gpu = {"cuda": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else {}
            own = {"loss_sum": self.loss_sum.cpu(), "cpu": torch.get_rng_state(), **on_gpu}
            content = {
                "identity": self.identity,
                "state": asdict(self.state),
                "ranks": distributed.all_gather(own),
                **{name: each.state_dict() for name, each in self.stateful.items()},
            }
            if rank() == 0:
                checkpoint.save_checkpoint(self.files.checkpoint, content)
        self.last_save = time.perf_counter()

    def _resume(self) -> None:
        path = self.files.checkpoint
        saved = checkpoint.load_checkpoint(path, self.device)
        if names := checkpoint.changed(saved.get("identity", {}), self.identity):
            raise CheckpointError(f"{path} belongs to a run with different values of {names}. Choose another --name.")
        try:
            for name, each in self.stateful.items():
                each.load_state_dict(saved[name])
            own = saved["ranks"][rank()]
            torch.set_rng_state(own["cpu"].cpu())
            if self.device.type == "cuda" and "cuda" in own:
                torch.cuda.set_rng_state(own["cuda"].cpu(), self.device)
            self.loss_sum = own["loss_sum"].to(self.device)
            self.state = _State(**saved["state"])
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} is damaged ({error!r}). Start over with --overwrite.") from error
        self.state.exclusive = self.state.exclusive and self.session.exclusive

    def _any_rank(self, flag: bool) -> bool:
        if world_size() == 1:
            return flag
        flags = torch.tensor(float(flag), device=self.device)
        return self.state.step % _AGREE_EVERY == 0 and bool(distributed.all_reduce_sum(flags))

    @contextmanager
    def _clock_stopped(self) -> Iterator[None]:
        """Exclude the time inside the context from the training time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.state.seconds += time.perf_counter() - self.clock
        yield
        self.clock = time.perf_counter()

    def _peak_bytes(self) -> int:
        """Return the largest memory use on the device, in this session and before. It is 0 on a CPU."""
        now = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        return max(now, self.state.peak_bytes)
