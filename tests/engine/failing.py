"""Ranks that fail in every way; functions that processes can import."""

import gc
import os
import signal
import sys
import threading
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from plain import make_batch, make_stage, squared_error
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stagewright.engine import PeerError, Pipeline, RankContext

FAILING_RANK = 1
FAILING_STEP = 1


def describe(context: RankContext, tensor: Tensor) -> tuple[int, int, int, int, list[int], list[int], bool]:
    """What a rank finds: itself, its threads, its own copy of an argument, workers of its own, and torch out of the
    garbage collector's sight."""
    tensor += context.rank  # in place
    rows = [int(row) for row in DataLoader([1, 2, 3], num_workers=1)]  # type: ignore[arg-type]
    ranks, num_threads = (context.rank, context.num_ranks, dist.get_rank()), torch.get_num_threads()
    return *ranks, num_threads, tensor.tolist(), rows, not any(thing is vars(torch) for thing in gc.get_objects())


def variable(context: RankContext, name: str) -> str | None:
    """A variable of a rank's environment."""
    return os.environ.get(name)


def many_tensors(context: RankContext, count: int) -> list[Tensor]:
    """More tensors than a process may have open files."""
    return [torch.tensor([context.rank, index]) for index in range(count)]


class CannotForward(nn.Module):
    """Raises in the forward of the third microbatch of a step."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.block = make_stage(stage)
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        if self.num_forwards == 4 * FAILING_STEP + 3:
            raise ValueError("boom in forward")
        return self.block(x)  # type: ignore[no-any-return]


class Fuse(torch.autograd.Function):
    """Raises in the backward, once it is switched on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blows: bool) -> Tensor:
        ctx.blows = blows
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        if ctx.blows:
            raise ValueError("boom in backward")
        return dy, None


class CannotBackward(CannotForward):
    """Raises in the backward of the third microbatch of a step."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return self.block(Fuse.apply(x, self.num_forwards == 4 * FAILING_STEP + 3))  # type: ignore[no-any-return, no-untyped-call]


class CannotStep(torch.optim.SGD):
    """Raises in an update."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        if self.num_steps == FAILING_STEP + 1:
            raise ValueError("boom in optimizer")
        super().step()


def fail_in_step(context: RankContext, where: str) -> None:
    """One rank fails in the second step of a training; all others wait for it."""
    torch.set_num_threads(1)
    fails = context.rank == FAILING_RANK
    module = {"forward": CannotForward, "backward": CannotBackward}.get(where, make_stage)
    optimizer = CannotStep if fails and where == "optimizer" else torch.optim.SGD
    with Pipeline(
        module if fails else make_stage,
        schedule="1f1b",
        num_microbatches=4,
        loss_fn=squared_error,
        optimizer=lambda parameters: optimizer(parameters, lr=0.1),
        transport=context.transport,
        share_loss=True,
    ) as pipe:
        for step in range(10):
            pipe.train_step(*make_batch(8, step))


def end_abruptly(context: RankContext, how: str) -> None:
    """One rank ends without a word while the others wait for it, in a step or in code of their own."""
    meet = dist.barrier if how == "_exit" else partial(context.transport.gather, b"")
    meet()
    if context.rank == FAILING_RANK:
        match how:
            case "_exit":
                os._exit(3)
            case "exit":
                sys.exit(0)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
    meet()


def end_while_another_is_busy(context: RankContext) -> None:
    """One rank fails while another computes and does not look."""
    context.transport.gather(b"")
    if context.rank == FAILING_RANK:
        raise KeyError("boom")
    while True:
        time.sleep(60)


class HasLock(Exception):  # noqa: N818
    """An error that cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def raise_unpicklable(context: RankContext) -> None:
    """Fail with what cannot be brought to the launcher as it is."""
    error = HasLock("boom with a lock")
    error.add_note("a note")
    raise error


def return_unpicklable(context: RankContext) -> object:
    """Return what cannot be brought to the launcher."""
    return threading.Lock()


def fail_in_user_code(context: RankContext) -> None:
    """One rank fails outside of a step; the others talk to it by themselves, not through the transport."""
    dist.barrier()
    if context.rank == FAILING_RANK:
        raise OSError(5, "boom on a disk")
    dist.barrier()


def return_early(context: RankContext) -> None:
    """One rank returns while the others wait for what it never sends."""
    if context.rank != FAILING_RANK:
        context.transport.gather(b"")


def tell_what_was_seen(context: RankContext, where: str) -> str:
    """The error that each rank sees, when one fails in a step."""
    try:
        fail_in_step(context, where)
    except (PeerError, ValueError) as error:
        seen = f"{type(error).__name__}: {error}"
        try:
            fail_in_step(context, where)
        except PeerError:
            return seen
    return "nothing"
