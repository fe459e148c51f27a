"""Checkpoints: with everything that an update depends on, so that training resumes to the last bit."""

from io import BytesIO
from typing import Any

import pytest
import torch
from meanings import ALL, ONE_COPY, Named, on_threads, together, under, weights_of
from tied import TIED, Build, Last, make_text, sum_and_count
from torch import nn

from stagewright.engine import Pipeline, RankContext
from stagewright.schedules import Schedule, create

BATCHES = [make_text(9, step) for step in range(6)]


class Low(Build):
    """The tied model in bfloat16, with dropout and a batch norm that remembers; the head is not in low precision."""

    def __call__(self, stage: int) -> nn.Module:
        module = super().__call__(stage).bfloat16()
        if isinstance(module, Last):
            return module
        return nn.Sequential(module, nn.Dropout(0.2), nn.BatchNorm1d(5, dtype=torch.bfloat16))


TIED_LOW = [["0.embedding.weight", *TIED[0][1:]]]


def make(context: RankContext, schedule: Schedule) -> Pipeline:
    torch.set_num_threads(1)
    return Pipeline(
        Low(schedule.num_stages),
        schedule=schedule,
        loss_fn=sum_and_count,
        optimizer=lambda named: torch.optim.AdamW(named, lr=0.01),
        transport=context.transport,
        share_loss=True,
        tied=TIED_LOW,
        max_norm=0.7,
        master_weights=True,
        loss_scale="dynamic",
        deferred_batch_norm=True,
    )


def train(pipe: Pipeline, start: int, stop: int) -> list[Any]:
    """(loss, norm, scale) of each step."""
    return [(pipe.train_step(*batch), pipe.grad_norm, pipe.loss_scale) for batch in BATCHES[start:stop]]


def everything(pipe: Pipeline) -> Named:
    """All that a rank trains and remembers."""
    tensors = dict(weights_of(pipe.modules))
    for stage, module in pipe.modules.items():
        tensors |= {(stage, f"buffer {name}"): buffer.clone() for name, buffer in module.named_buffers()}
    for stage, weights in pipe._assembly.weights.items():
        tensors |= {(stage, f"trained {name}"): weight.detach().clone() for name, weight in weights.trained.items()}
    return tensors


def through_a_file(state: Any) -> Any:
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resume(context: RankContext, schedule: Schedule) -> None:
    """Straight on, and again from what was saved half-way; in the first step a gradient overflows."""
    with make(context, schedule) as pipe:
        pipe._updater.loss_scale.value = 2.0**126
        given = train(pipe, 0, 3)
        assert pipe.loss_scale < 2.0**126
        saved = through_a_file(pipe.state_dict())
        given = train(pipe, 3, 6)
        after = everything(pipe)
        state = pipe.state_dict()["optimizer"]["state"]
    with make(context, schedule) as again:
        again.train_step(*BATCHES[5])  # whatever was there before
        again.load_state_dict(saved)
        assert again.num_steps == 3
        assert train(again, 3, 6) == given
        assert together([after, everything(again)])
        resumed = again.state_dict()["optimizer"]["state"]
    assert state.keys() == resumed.keys()
    for key, of_parameter in state.items():
        assert all(torch.equal(resumed[key][name], tensor) for name, tensor in of_parameter.items())


@under(ALL)
def test_resumes_to_the_last_bit(schedule: Schedule) -> None:
    """Masters, optimizer, loss scale, batch norms and the step that random numbers follow from."""
    on_threads(resume, schedule)


def step_alone(context: RankContext, schedule: Schedule) -> None:
    """A trainer that steps by itself has changed the masters alone when it saves."""
    options = {"loss_fn": sum_and_count, "transport": context.transport, "master_weights": True}
    with Pipeline(Low(schedule.num_stages), schedule=schedule, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.named_parameters(), lr=0.5)
        pipe.forward_backward(*BATCHES[0])
        optimizer.step()
        state = pipe.state_dict()
        for stage, masters in state["masters"].items():
            for name, master in masters.items():
                assert master.dtype == torch.float32
                assert torch.equal(state["stages"][stage][name], master.bfloat16())


@under(ONE_COPY)
def test_what_is_saved_of_the_stages_is_what_the_masters_say(schedule: Schedule) -> None:
    on_threads(step_alone, schedule)


def load_plain_weights(context: RankContext, schedule: Schedule) -> None:
    """A state without masters, such as one from a training without them."""
    options = {"loss_fn": sum_and_count, "transport": context.transport}
    with Pipeline(Low(schedule.num_stages), schedule=schedule, **options) as pipe:
        for module in pipe.modules.values():
            for parameter in module.parameters():
                parameter.data.add_(1)
        state = pipe.state_dict()
        assert not any(state["masters"].values())
    with Pipeline(Low(schedule.num_stages), schedule=schedule, master_weights=True, **options) as pipe:
        pipe.load_state_dict(state)
        pipe.predict(BATCHES[0][0])
        for stage, module in pipe.modules.items():
            for name, parameter in module.named_parameters():
                assert torch.equal(parameter, state["stages"][stage][name])


def test_masters_are_made_of_the_weights_where_none_were_saved() -> None:
    on_threads(load_plain_weights, ONE_COPY[1])


def load(context: RankContext, schedule: Schedule, change: Any) -> None:
    options = {"loss_fn": sum_and_count, "transport": context.transport}
    with Pipeline(Low(schedule.num_stages), schedule=schedule, master_weights=True, **options) as pipe:
        state = pipe.state_dict()
        change(state)
        pipe.load_state_dict(state)


def of_another_rank(state: Any) -> None:
    state["stages"] = {stage + 1: weights for stage, weights in state["stages"].items()}


def of_other_masters(state: Any) -> None:
    for masters in state["masters"].values():
        masters["another"] = masters.popitem()[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_another_rank, r"this rank owns the stages \[[01]\]: the state has \[[12]\]"),
        (of_other_masters, r"stage [01] keeps fp32 copies of .*: the state has those of .*'another'"),
    ],
)
def test_a_state_of_something_else_is_refused(change: Any, message: str) -> None:
    schedule = create("1f1b", num_ranks=2, num_microbatches=4)
    with pytest.raises(ValueError, match=message):
        on_threads(load, schedule, change)
