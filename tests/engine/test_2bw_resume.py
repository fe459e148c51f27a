"""Checkpoints of pipelines that keep old weights: training resumes to the last bit, older versions included."""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import pytest
import torch
from delayed import Case, make_pipeline, newest_of, train_delayed
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import make_batch, make_stage, momentum, squared_error
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext, launch_local

CASES = [
    Case(1, 2, num_batches=8, optimizer="adam"),
    Case(2, 1, num_batches=8, model="tied", max_norm=0.3),
    Case(3, 3, num_batches=8, model="dropout", recompute="full"),
    Case(2, 3, "2bw-interleaved", {"num_chunks": 2}, num_batches=8),
    Case(3, 2, "pipedream", num_batches=8),
    Case(3, 2, "pipedream", {"vertical_sync": True}, num_batches=8),
]


def label(case: Case) -> str:
    return f"{case.schedule}-P{case.num_ranks}" + ("-sync" if case.options.get("vertical_sync") else "")


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """To a file and back, as plain tensors and numbers."""
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def train(pipe: Pipeline, batches: Sequence[Any]) -> list[float]:
    losses = [pipe.train_step(*batch) for batch in batches]
    return [loss.item() for loss in losses if loss is not None]


def train_on_and_resumed(context: RankContext, case: Case, stop: int) -> list[Any]:
    """Train some batches, save, and train on: with this pipeline, and with a new one that has loaded the state."""
    batches = case.batches
    results = []
    with make_pipeline(context, case) as pipe:
        train(pipe, batches[:stop])
        state = saved(pipe.state_dict())
        results.append((train(pipe, batches[stop:]), newest_of(pipe)))
    with make_pipeline(context, case) as pipe:
        pipe.load_state_dict(state)
        assert pipe.num_steps == stop
        results.append((train(pipe, batches[stop:]), newest_of(pipe)))
    return results


def assert_equal(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for key, weight in one[1].items():
        assert torch.equal(weight, other[1][key]), key


@pytest.mark.parametrize("case", CASES, ids=label)
@settings(max_examples=4, deadline=None)
@given(stop=st.integers(0, 7))
def test_training_resumes_to_the_last_bit(case: Case, stop: int) -> None:
    """The next batch reads a version that is not the newest, so that one is in the state too."""
    for on, resumed in launch_local(train_on_and_resumed, case.num_ranks, backend="threads", args=(case, stop)):
        assert_equal(on, resumed)


class Low(nn.Module):
    """Weights in bfloat16 and in float32 beside each other, dropout, and a buffer that changes."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.block = make_stage(stage).bfloat16()
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.norm(self.block(x.bfloat16()).float()))
        return y


def resume_in_low_precision(context: RankContext, schedule: str, stop: int) -> list[Any]:
    options: dict[str, Any] = {"master_weights": True}
    if schedule == "2bw":
        options |= {"max_norm": 0.5, "loss_scale": "dynamic"}
    batches = [tuple(tensor.float() for tensor in make_batch(9, step)) for step in range(6)]
    results, state = [], {}
    for start in (0, stop):
        pipe = Pipeline(
            Low,
            schedule=schedule,
            num_microbatches=3,
            loss_fn=squared_error,
            optimizer=momentum,
            transport=context.transport,
            share_loss=True,
            **options,
        )
        with pipe:
            if start:
                pipe.load_state_dict(state)
            else:
                train(pipe, batches[:stop])
                state = saved(pipe.state_dict())
            losses = train(pipe, batches[stop:])
            masters = {key: weight.detach().clone() for key, weight in pipe.named_parameters()}
            results.append((losses, newest_of(pipe) | masters))
    return results


@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
@pytest.mark.parametrize("stop", [1, 3])
def test_masters_buffers_and_scales_go_along(schedule: str, stop: int) -> None:
    for on, resumed in launch_local(resume_in_low_precision, 3, backend="threads", args=(schedule, stop)):
        assert_equal(on, resumed)


def load_while_in_flight(context: RankContext) -> list[Any]:
    """The state of an early batch, loaded by a pipeline that has gone on and has microbatches under way."""
    case = Case(3, 3, num_batches=8)
    batches = case.batches
    with make_pipeline(context, case) as pipe:
        train(pipe, batches[:2])
        state = saved(pipe.state_dict())
        first = (train(pipe, batches[2:5]), newest_of(pipe))
        train(pipe, batches[5:7])
        pipe.load_state_dict(state)
        return [first, (train(pipe, batches[2:5]), newest_of(pipe))]


def test_a_pipeline_may_go_back_to_what_it_was() -> None:
    for first, again in launch_local(load_while_in_flight, 3, backend="threads"):
        assert_equal(first, again)


def move(context: RankContext, source: Case, destination: Case) -> tuple[Any, Any]:
    """Train by one schedule, go on by another."""
    with make_pipeline(context, source) as pipe:
        train(pipe, source.batches[:3])
        state, weights = saved(pipe.state_dict()), newest_of(pipe)
    with make_pipeline(context, destination) as pipe:
        pipe.load_state_dict(state)
        moved = newest_of(pipe)
        losses = train(pipe, destination.batches[:2])
    assert all(torch.equal(moved[key], weight) for key, weight in weights.items())
    return losses, weights


@pytest.mark.parametrize(
    ("source", "destination"),
    [("1f1b", "2bw"), ("2bw", "1f1b"), ("pipedream", "2bw"), ("2bw", "pipedream")],
)
def test_another_schedule_takes_the_newest_weights(source: str, destination: str) -> None:
    """There are no older ones for its rule, so it starts as with weights that are new."""
    cases = Case(2, 3, source), Case(2, 4, destination)
    results = launch_local(move, 2, backend="threads", args=cases)
    weights = {key: weight for _, of_rank in results for key, weight in of_rank.items()}
    modules = {stage: make_stage(stage) for stage in range(2)}
    for stage, module in modules.items():
        module.load_state_dict({name: weight for (owner, name), weight in weights.items() if owner == stage})
    x, y = cases[1].batches[0]
    first = squared_error(nn.Sequential(*modules.values())(x), y).item()
    for losses, _ in results:
        if destination != "pipedream":
            assert losses[0] == pytest.approx(first, rel=1e-12)
        if destination == "2bw":  # the second batch too runs on the weights that were loaded
            x, y = cases[1].batches[1]
            assert losses[1] == pytest.approx(squared_error(nn.Sequential(*modules.values())(x), y).item(), rel=1e-12)


def save_at_the_end(context: RankContext, case: Case) -> tuple[Any, list[int]]:
    with make_pipeline(context, case) as pipe:
        train(pipe, case.batches)
        training = pipe.state_dict()["training"]
        return newest_of(pipe), list(training["older_versions"][context.rank])


def test_what_is_saved_are_the_newest_weights() -> None:
    """Not those that the last batch ran on: these are the older version, which is in the state beside them."""
    case = Case(2, 2, num_batches=4)
    plain = train_delayed(case).weights
    for weights, older in launch_local(save_at_the_end, 2, backend="threads", args=(case,)):
        assert older == [3]
        for key, weight in weights.items():
            torch.testing.assert_close(weight, plain[key], rtol=1e-12, atol=1e-12)
