"""Which kernels take the time of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from adahessian.lab.bench.cells import Cell, unavailable
from adahessian.lab.bench.conditions import Conditions
from adahessian.lab.bench.contenders import REFERENCE, Contender
from adahessian.lab.bench.training import Mode
from adahessian.lab.bench.whole_step import let_measure_every, room_for_compiled_code
from adahessian.lab.bench.workloads import Workload, make_task

# In the first steps libraries choose their algorithms, and graphs are captured.
_WARMUP_PERIODS = 2
_LONGEST = 12
_LONGEST_NAME = 300


def profile_whole_steps(
    workload: Workload, mode: Mode, contenders: Iterable[Contender], *, conditions: Conditions, rounds: int
) -> Iterator[tuple[str, Cell]]:
    """The name and the cell of SGD and of each contender: its kernels, how many and how long, and the longest by name.

    On a CPU these are operations of torch. A profiler slows what comes after it, too: this is for the end of a run.

    Args:
        workload: What to train.
        mode: How to run a step.
        contenders: Whose steps to profile, beside SGD's.
        conditions: What all cells have in common.
        rounds: How often each is profiled. The round of median length counts.
    """
    with room_for_compiled_code(mode):
        for contender in (REFERENCE, *contenders):
            # By a generator of its own, which lets go of each before the next begins.
            yield from _profiled(workload, mode, contender, conditions, rounds)


def _profiled(
    workload: Workload, mode: Mode, contender: Contender, conditions: Conditions, rounds: int
) -> Iterator[tuple[str, Cell]]:
    device = torch.device(conditions.device)
    try:
        task = make_task(workload, device=device, channels_last=conditions.channels_last, seed=conditions.seed)
        training = contender.start(task, mode)
    except Exception as error:
        cell = unavailable(error)
        yield from ((name, cell) for name in contender.schedules)
        return
    for name, every in contender.schedules.items():
        try:
            let_measure_every(training, every)
            for _ in range(_WARMUP_PERIODS * every):
                training.step()
            found = [kernels_of(training.step, every, device) for _ in range(rounds)]
            cell = sorted(found, key=lambda each: each["milliseconds"])[rounds // 2]
        except Exception as error:
            cell = unavailable(error)
        yield name, cell


def kernels_of(step: Callable[[], object], steps: int, device: torch.device) -> Cell:
    """Kernels of so many steps, counted for one. Those that run side by side count one after the other."""
    on_gpu = device.type == "cuda"
    activity, where = (ProfilerActivity.CUDA, "CUDA") if on_gpu else (ProfilerActivity.CPU, "CPU")
    # Without acc_events older versions of torch warn of cycles, of which there is one here.
    with profile(activities=[activity], acc_events=True) as recorded:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    kernels = [
        {
            "name": event.key[:_LONGEST_NAME],
            "launches": event.count / steps,
            "milliseconds": (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3 / steps,
        }
        for event in recorded.key_averages()
        # Annotations, such as the whole step of an optimizer, span others.
        if not event.is_user_annotation and event.device_type.name == where
    ]
    if not kernels:
        raise RuntimeError("the profiler has recorded nothing: is it allowed to, on this machine?")
    kernels.sort(key=lambda kernel: -kernel["milliseconds"])
    return {
        "milliseconds": sum(kernel["milliseconds"] for kernel in kernels),
        "launches": sum(kernel["launches"] for kernel in kernels),
        "longest": kernels[:_LONGEST],
    }
