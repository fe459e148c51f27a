"""A training may go on for ever: it holds no more after 2,000 steps than after the first few."""

import ctypes
import threading
from collections.abc import Sequence
from tempfile import TemporaryFile
from typing import Any

import pytest
import torch
from lasting import WARMUP, Holdings, holdings, train_long
from launching import Kind, launch_on

from stagewright.schedules import Schedule, create, find, names

RUNNABLE = [name for name in names() if find(name).runnable and name != "none"]
# Torch's own loop, without this engine, leaves up to 8 bytes a step; an object that nobody frees has 32 or more.
BYTES_A_STEP = 28
BLOCKS_A_STEP = 0.25


def assert_holds_no_more(found: Sequence[Holdings], num_steps: int) -> None:
    early, halfway, late = found
    for then, now in ((early, late), (halfway, late)):
        assert now.num_tensors <= then.num_tensors
        assert now.num_graphs <= then.num_graphs
        assert now.num_threads <= then.num_threads
        assert now.num_files <= then.num_files
    if num_steps >= 2000:  # in few steps the chance of what was freed when says more
        assert late.num_bytes - halfway.num_bytes < BYTES_A_STEP * num_steps / 2
        assert late.num_blocks - halfway.num_blocks < BLOCKS_A_STEP * num_steps / 2


def assert_lasts(kind: Kind, schedule: Schedule, num_steps: int, **options: Any) -> None:
    results = launch_on(kind, train_long, schedule.num_ranks, (num_steps, {"schedule": schedule, **options}))
    for found in filter(None, results):
        assert_holds_no_more(found, num_steps)


def of(name: str) -> Schedule:
    return create(name, num_ranks=2, num_microbatches=4)


def test_whatever_is_kept_is_seen() -> None:
    before = holdings()
    tensors = [torch.ones(1) for _ in range(10)]
    graphs = [torch.ones(1, requires_grad=True) * 2 for _ in range(10)]
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    thread.start()
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    blocks = [malloc(ctypes.c_size_t(32)) for _ in range(1000)]
    objects = [object() for _ in range(5000)]
    with TemporaryFile():
        after = holdings()
    event.set()
    thread.join()
    free = ctypes.CDLL(None).free
    for block in blocks:
        free(ctypes.c_void_p(block))
    assert after.num_tensors - before.num_tensors == len(tensors) + 2 * len(graphs)  # and what they are made of
    assert after.num_graphs - before.num_graphs == len(graphs)
    assert after.num_threads - before.num_threads == 1
    assert after.num_files - before.num_files == 1
    assert after.num_blocks - before.num_blocks > len(objects)
    assert after.num_bytes - before.num_bytes > 32 * len(blocks) or not before.num_bytes


@pytest.mark.parametrize("name", ["1f1b", "2bw"])
def test_hundreds_of_steps_leave_nothing_behind(name: str) -> None:
    assert_lasts("threads", of(name), 4 * WARMUP)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNABLE)
def test_thousands_of_steps_leave_nothing_behind(name: str) -> None:
    assert_lasts("threads", of(name), 2000)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe", "2bw", "pipedream"])
def test_thousands_of_steps_of_processes_leave_nothing_behind(name: str) -> None:
    assert_lasts("gloo", of(name), 2000)
