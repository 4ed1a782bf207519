"""Processes that run functions of the tests together, over gloo."""

import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch import nn


class RanksFailedError(Exception):
    """The tracebacks of the ranks."""


class Ranks:
    """Processes that wait for functions to run, because starting them takes longer than most tests.

    Args:
        size: The number of processes.
    """

    def __init__(self, size):
        self.size = size
        context = mp.get_context("spawn")
        meeting = Path(tempfile.mkdtemp()) / "meeting"
        pipes = [context.Pipe() for _ in range(size)]
        self._pipes = [here for here, _ in pipes]
        self.processes = [
            context.Process(target=_work, args=(rank, size, meeting, there), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, there in pipes:
            there.close()

    def __call__(self, function, *args):
        """Call a function of the rank, the number of ranks and the arguments on each rank, and return the results."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [self._answer(pipe) for pipe in self._pipes]
        errors = [error for _, error in answers if error is not None]
        if errors:
            raise RanksFailedError("\n".join(errors))
        return [result for result, _ in answers]

    def _answer(self, pipe):
        try:
            if not pipe.poll(600):
                return None, "no answer"
            return pipe.recv()
        except EOFError:
            return None, "the process died"

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()


def _work(rank, size, meeting, pipe):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=240)
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(rank, size, *args), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))


def part_of(whole, rank, size):
    """A rank's share of a batch."""
    return tuple(tensor.chunk(size)[rank] for tensor in whole)


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)
