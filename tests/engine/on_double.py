"""A pytest plugin (``-p on_double``): whatever runs on threads runs on the double of NCCL instead.

A new test is on the double without being told. Only those in ``ELSEWHERE`` are left out, each for the reason there,
and of a test that runs once per ``kind`` of transport the run on gloo.
"""

from collections.abc import Generator, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import pytest
from nccl_double import DoubledTransport, Switchboard, transport_on_double

from stagewright.engine import Pipeline
from stagewright.engine.transport.hub import Hub

# What a test has counted, on its report.
NUM_RANKS: Final = "ranks on the double"

PROCESSES: Final = "starts processes, which are connected by gloo; the same on threads is another test"
LAUNCHERS: Final = "is about starting processes, and how they end"
SPREAD: Final = "needs torch.distributed for its DTensors, and so processes"
GLOO: Final = "is about gloo and the memory that processes share"
# By file, or by file and test: why it is not run on the double.
ELSEWHERE: Final[Mapping[str, str | Mapping[str, str]]] = {
    "test_context": LAUNCHERS,
    "test_device": "makes the double itself",
    "test_environment": LAUNCHERS,
    "test_fsdp": SPREAD,
    "test_gloo": GLOO,
    "test_launch": LAUNCHERS,
    "test_meanings_processes": PROCESSES,
    "test_nccl": "lets gloo play the part of NCCL, between processes",
    "test_nccl_double": "is about the double itself",
    "test_on_double": "runs all of this",
    "test_parity_processes": PROCESSES,
    "test_tensor_parallel": SPREAD,
    "test_2bw": {"test_equals_the_plain_loop_in_processes": PROCESSES},
    "test_2bw_failures": {"test_every_process_learns_it_too": PROCESSES},
    "test_batch_norm": {"test_deferred_statistics_of_replicas_in_processes": PROCESSES},
    "test_checkpoint": {"test_processes_save_and_go_on_too": PROCESSES},
    "test_copies": {"test_processes_do_not_abort": PROCESSES},
    "test_crossing": {"test_crosses_between_processes": PROCESSES},
    "test_data_parallel": {
        "test_replicas_of_processes_keep_the_delayed_rule": PROCESSES,
        "test_replicas_of_processes_train_alike": PROCESSES,
    },
    "test_disturbance": {"test_processes_may_be_late_and_woken_for_nothing": PROCESSES},
    "test_mesh": {
        "test_a_mesh_of_the_trainers_own_serves_as_well": "makes a DeviceMesh, which knows processes only",
        "test_a_mesh_whose_ranks_do_not_ascend_is_refused_on_all_and_every_other_one_trains": (
            "makes a DeviceMesh, which knows processes only"
        ),
    },
    "test_mismatched_ranks": {"test_processes_find_it_too": PROCESSES},
    "test_on_nan": {"test_processes_raise_it_too": PROCESSES},
    "test_pipedream": {"test_equals_the_plain_loop_in_processes": PROCESSES},
    "test_preemption": {"test_processes_finish_the_step_in_which_one_of_them_gets_the_signal": PROCESSES},
    "test_replicated": {
        "test_equals_the_delayed_loop_in_processes": PROCESSES,
        "test_equals_the_plain_loop_in_processes": PROCESSES,
    },
    "test_two_buffered_interleaved": {"test_it_trains_so_in_processes": PROCESSES},
}

# Tests of these files whose shapes change after the first step: on NCCL that has to be said.
CHANGING_SHAPES: Final = {
    "test_dying": ("test_what_users_bring_fails_on_one_rank_and_ends_all",),
    "test_mismatched_ranks": ("test_as_many_rows_as_microbatches_are_enough",),
}


class DoubledTransports:
    """Stands in for ``ThreadTransport``: connects the ranks of a hub by communicators."""

    def __init__(self) -> None:
        self.num_ranks = 0
        self._boards: WeakKeyDictionary[Hub, Switchboard] = WeakKeyDictionary()

    def __call__(self, hub: Hub, rank: int) -> DoubledTransport:
        self.num_ranks += 1
        return transport_on_double(hub, self._boards.setdefault(hub, Switchboard()), rank)


def is_elsewhere(file: str, test: str, parameters: Mapping[str, Any]) -> bool:
    """Whether a test is left out."""
    listed = ELSEWHERE.get(file, {})
    return isinstance(listed, str) or test in listed or parameters.get("kind") == "gloo"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is listed."""
    left_out = []
    for item in items:
        assert isinstance(item, pytest.Function)
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if is_elsewhere(item.path.stem, item.originalname, parameters):
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    names = {item.nodeid for item in left_out}
    items[:] = [item for item in items if item.nodeid not in names]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests did not only pass, but ran ranks on the double."""
    passed = [dict(report.user_properties).get(NUM_RANKS, 0) for report in terminalreporter.getreports("passed")]
    count = sum(num_ranks > 0 for num_ranks in passed)
    terminalreporter.write_line(f"{count} of the {len(passed)} tests that passed ran ranks on the double of NCCL")


TRANSPORTS: Final = pytest.StashKey[DoubledTransports]()


@pytest.fixture(autouse=True)
def threads_are_doubled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """For every test."""
    transports = DoubledTransports()
    request.node.stash[TRANSPORTS] = transports
    monkeypatch.setattr("stagewright.engine.launch.local.ThreadTransport", transports)
    if request.node.originalname in CHANGING_SHAPES.get(request.path.stem, ()):
        monkeypatch.setitem(Pipeline.__init__.__kwdefaults__, "dynamic_shapes", True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Count the ranks of a test."""
    try:
        yield
    finally:
        item.user_properties.append((NUM_RANKS, item.stash[TRANSPORTS].num_ranks))
