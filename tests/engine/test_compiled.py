"""Stages under torch.compile: equal to eager, under full backward and under split backward."""

import logging
import shutil
from typing import Any

import pytest
import torch
from meanings import ALL, Trained, assert_same, make_batches, on_threads, train, train_plainly, under
from plain import make_stage
from torch import Tensor, nn

from stagewright.schedules import Schedule, create

BATCHES = make_batches(3)


class Graphs:
    """A backend that runs what it is given as it is, and counts it."""

    def __init__(self) -> None:
        self.num_operations = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num_operations += sum(node.op.startswith("call") for node in graph.graph.nodes)
        return graph.forward


class Blocks(nn.Module):
    """A stage of which one part is compiled, another part in place, and the rest not at all."""

    def __init__(self, stage: int, backend: Any) -> None:
        super().__init__()
        self.first = make_stage(stage)
        self.second = make_stage(10 + stage)
        self.plain = make_stage(20 + stage)
        if backend is not None:
            self.second.compile(backend=backend)
            self.first = torch.compile(self.first, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.second(self.first(x)))


class Build:
    """stage -> module, compiled whole or in parts."""

    def __init__(self, backend: Any, *, in_parts: bool) -> None:
        self._backend = backend
        self._in_parts = in_parts

    def __call__(self, stage: int) -> nn.Module:
        if self._in_parts:
            return Blocks(stage, self._backend)
        module = make_stage(stage)
        return module if self._backend is None else torch.compile(module, backend=self._backend)


def without_prefix(results: list[Trained]) -> list[Trained]:
    """Names as they were before torch.compile."""
    for result in results:
        for attribute in ("weights", "gradients"):
            named = {
                (stage, name.replace("_orig_mod.", "")): tensor
                for (stage, name), tensor in vars(result)[attribute].items()
            }
            setattr(result, attribute, named)
    return results


def assert_as_eager(schedule: Schedule, backend: Any, *, in_parts: bool) -> None:
    torch.compiler.reset()
    options = {"build_stage": Build(backend, in_parts=in_parts)}
    results = without_prefix(on_threads(train, schedule, BATCHES, options))
    eager = Build(None, in_parts=in_parts)
    assert_same(results, train_plainly(schedule.num_stages, BATCHES, build_stage=eager))


@under([create("1f1b", num_ranks=2, num_microbatches=4)])
def test_compiled_stages_train_as_eager_ones(schedule: Schedule) -> None:
    graphs = Graphs()
    assert_as_eager(schedule, graphs, in_parts=False)
    assert graphs.num_operations >= 2 * 10  # they are compiled indeed


@under([create("zb-h1", num_ranks=2, num_microbatches=4)])
def test_compiled_parts_under_split_backward_get_their_weight_gradients_at_once(
    schedule: Schedule, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is right, and told; what is not compiled waits for its W."""
    with caplog.at_level(logging.INFO, logger="stagewright"):
        assert_as_eager(schedule, Graphs(), in_parts=True)
    told = [record.getMessage() for record in caplog.records if "cannot be put off" in record.getMessage()]
    assert len(told) == schedule.num_stages
    for message in told:
        assert "first._orig_mod.widen.weight" in message
        assert "second.widen.weight" in message
        assert "plain.widen.weight" not in message


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on CPUs needs a C++ compiler, here g++")
@under(ALL)
@pytest.mark.parametrize("in_parts", [False, True])
def test_compiled_by_inductor(schedule: Schedule, in_parts: bool) -> None:
    assert_as_eager(schedule, "inductor", in_parts=in_parts)
