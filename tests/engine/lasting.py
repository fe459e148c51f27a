"""What a training holds on to while it goes on; functions that processes can import."""

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from plain import make_batch, make_stage, momentum, squared_error
from torch import Tensor

from stagewright.engine import Pipeline, RankContext
from stagewright.engine.transport.gloo import GlooTransport

# Steps after which everything that is kept from step to step is there: recordings of ten of them, say.
WARMUP: Final = 60
WIDTH: Final = 4


# The numbers of glibc's mallinfo2; ``uordblks`` bytes are in use, and ``hblkhd`` in pieces mapped apart.
_MALLINFO: Final = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in _MALLINFO]


@dataclass(frozen=True)
class Holdings:
    """What a process holds.

    Args:
        num_bytes: that were allocated in C and not freed; 0 where glibc does not say.
        num_blocks: the same in Python, as blocks of memory.
        num_tensors, num_graphs: tensors, and those of them that a graph hangs on.
        num_threads, num_files: as the system counts them.
    """

    num_bytes: int
    num_blocks: int
    num_tensors: int
    num_graphs: int
    num_threads: int
    num_files: int


def holdings() -> Holdings:
    """What this process holds now."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    num_graphs = sum(tensor.grad_fn is not None for tensor in tensors)
    num_tensors = len(tensors)
    del tensors
    files, tasks = (os.listdir(f"/proc/self/{name}") for name in ("fd", "task"))
    num_threads = max(len(tasks), threading.active_count())
    return Holdings(_allocated(), sys.getallocatedblocks(), num_tensors, num_graphs, num_threads, len(files))


def _allocated() -> int:
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def train_long(context: RankContext, num_steps: int, options: Mapping[str, Any]) -> list[Holdings]:
    """What a rank holds after some steps, halfway, and after all of them; no rank goes on meanwhile."""
    torch.set_num_threads(1)
    found = []
    with Pipeline(
        make_tiny_stage, loss_fn=squared_error, optimizer=momentum, transport=context.transport, **options
    ) as pipe:
        batches = [make_batch(pipe.num_microbatches, step, WIDTH) for step in range(7)]
        for step in range(num_steps):
            pipe.train_step(*batches[step % 7])
            if step + 1 == WARMUP // 2:
                pipe.flush()  # so that what a flush, and what follows it, make for the first time is there
            if step + 1 in (WARMUP, num_steps // 2, num_steps):
                pipe.flush()
                context.transport.gather(b"")
                if context.rank == 0 or isinstance(context.transport, GlooTransport):  # threads hold all together
                    found.append(holdings())
                context.transport.gather(b"")
    return found


def make_tiny_stage(stage: int) -> torch.nn.Module:
    """A stage of next to no work."""
    return make_stage(stage, WIDTH)
