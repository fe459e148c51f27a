"""Precision: autocast, and low-precision weights with fp32 masters, as a plain loop over the microbatches does it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from meanings import (
    ALL,
    ONE_COPY,
    ROWS,
    TWO_COPIES,
    Named,
    assert_close,
    make_batches,
    on_threads,
    together,
    under,
    weights_of,
)
from plain import Block, make_stage, squared_error
from tied import TIED, Build, make_text, sum_and_count
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext
from stagewright.engine.launch.threads import run_threads
from stagewright.engine.transport.hub import Hub
from stagewright.engine.transport.threads import ThreadTransport
from stagewright.schedules import Schedule

BATCHES = [(x.float(), y.float()) for x, y in make_batches(4)]
NUM_MICROBATCHES = 4


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.03, momentum=0.9)


def make(context: RankContext, schedule: Schedule, **options: Any) -> Pipeline:
    torch.set_num_threads(1)
    return Pipeline(schedule=schedule, transport=context.transport, **{"loss_fn": squared_error, **options})


class Once(nn.Module):
    """A residual block that uses each weight once: where one is used twice, split backward rounds less often."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        block = make_stage(stage)
        assert isinstance(block, Block)
        self.norm, self.widen, self.narrow, self.last = block.norm, block.widen, block.narrow, block.twice

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.widen(self.norm(x)).chunk(2, dim=-1)
        x = x + self.narrow(torch.cat([left.tanh(), right], dim=-1))
        return x + self.last(x).tanh()


def make_float_stage(stage: int) -> nn.Module:
    """Ends in a sum with its input, which keeps the input's type."""
    return Once(stage).float()


def make_linear_stage(stage: int) -> nn.Module:
    """Ends in a linear, which autocast computes in low precision."""
    return nn.Sequential(Once(stage), Once(10 + stage).last).float()


def train_plainly(
    num_stages: int, build_stage: Callable[[int], nn.Module], autocast: torch.dtype
) -> tuple[list[float], Named]:
    """A loop over microbatches: how often something is rounded depends on how the batch is cut."""
    modules = {stage: build_stage(stage) for stage in range(num_stages)}
    model = nn.Sequential(*modules.values())
    optimizer, losses = sgd(model.parameters()), []
    for x, y in BATCHES:
        optimizer.zero_grad()
        losses.append(0.0)
        for part, target in zip(x.tensor_split(NUM_MICROBATCHES), y.tensor_split(NUM_MICROBATCHES)):
            with torch.autocast("cpu", autocast):
                loss = squared_error(model(part), target) * len(part) / ROWS
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    return losses, weights_of(modules)


def train_autocasting(context: RankContext, schedule: Schedule, build_stage: Any, autocast: Any) -> Any:
    options = {"build_stage": build_stage, "autocast": autocast, "optimizer": sgd, "share_loss": True}
    with make(context, schedule, **options) as pipe:
        losses = [pipe.train_step(*batch).item() for batch in BATCHES]
        assert {parameter.grad_dtype for _, parameter in pipe.named_parameters()} <= {None, torch.float32}
        return losses, weights_of(pipe.modules)


@under(ALL)
@pytest.mark.parametrize("build_stage", [make_float_stage, make_linear_stage])
def test_autocast_is_that_of_a_plain_loop(schedule: Schedule, build_stage: Any) -> None:
    results = on_threads(train_autocasting, schedule, build_stage, torch.bfloat16)
    losses, weights = train_plainly(schedule.num_stages, build_stage, torch.bfloat16)
    for own, _ in results:
        assert own == pytest.approx(losses, rel=1e-5)
    assert_close([own for _, own in results], weights, 1e-5)
    # It makes a difference, much larger than what is tolerated.
    full = together([own for _, own in on_threads(train_autocasting, schedule, build_stage, None)])
    assert max((full[key] - weight).abs().max().item() for key, weight in weights.items()) > 1e-4


class Wire(ThreadTransport):
    """Notes the types of what it sends to other stages."""

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(hub, rank)
        self.sent: dict[str, set[torch.dtype]] = {"activation": set(), "gradient": set()}

    def send(self, channel: Any, packed: Any, stage: int, microbatch: int) -> None:
        if channel.kind in self.sent:
            self.sent[channel.kind].update(tensor.dtype for tensor in packed.tensors)
        super().send(channel, packed, stage, microbatch)


def train_on_wire(context: RankContext, schedule: Schedule, build_stage: Any) -> tuple[Any, Any]:
    assert isinstance(context.transport, Wire)
    with make(context, schedule, build_stage=build_stage, autocast=torch.bfloat16) as pipe:
        pipe.forward_backward(*BATCHES[0])
        output = pipe.predict(BATCHES[0][0])
        return context.transport.sent, None if output is None else output.dtype


@under(ONE_COPY)
@pytest.mark.parametrize(
    ("build_stage", "dtype"), [(make_float_stage, torch.float32), (make_linear_stage, torch.bfloat16)]
)
def test_what_crosses_has_the_type_of_the_output(schedule: Schedule, build_stage: Any, dtype: torch.dtype) -> None:
    hub = Hub(schedule.num_ranks)
    transports = [Wire(hub, rank) for rank in range(schedule.num_ranks)]
    results = run_threads(train_on_wire, hub, transports, (schedule, build_stage))
    for kind in ("activation", "gradient"):
        assert set().union(*(sent[kind] for sent, _ in results)) == {dtype}
    assert {given for _, given in results if given is not None} == {dtype}


def make_bfloat16_stage(stage: int) -> nn.Module:
    """With a parameter that is not in low precision, and one that is frozen."""
    module = Once(stage).bfloat16()
    module.last = CastingLinear(module.last)
    module.norm.bias.requires_grad_(False)
    return module


class CastingLinear(nn.Module):
    """A linear with a float32 bias over bfloat16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        linear.bias = nn.Parameter(linear.bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.linear.weight) + self.linear.bias.to(x.dtype)


def train_masters_plainly(num_stages: int, accumulate_in: torch.dtype = torch.float32) -> tuple[list[float], Any, Any]:
    """Float32 masters; each microbatch's gradient is added in float32, and the result rounded to what computes."""
    modules = {stage: make_bfloat16_stage(stage) for stage in range(num_stages)}
    model = nn.Sequential(*modules.values())
    pairs = {
        (stage, name): (parameter, nn.Parameter(parameter.detach().float()))
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    optimizer, losses = sgd([master for _, master in pairs.values()]), []
    for x, y in BATCHES:
        totals: dict[tuple[int, str], Tensor] = {}
        losses.append(0.0)
        for part, target in zip(x.tensor_split(NUM_MICROBATCHES), y.tensor_split(NUM_MICROBATCHES)):
            loss = squared_error(model(part.bfloat16()), target)
            loss.backward(torch.tensor(len(part) / ROWS))
            losses[-1] += loss.item() * len(part) / ROWS
            for key, (parameter, _) in pairs.items():
                gradient = parameter.grad.to(accumulate_in)
                totals[key] = totals[key] + gradient if key in totals else gradient
                parameter.grad = None
        for key, (_, master) in pairs.items():
            master.grad = totals[key].float()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in pairs.values():
                parameter.copy_(master)
    return losses, {key: master.detach() for key, (_, master) in pairs.items()}, weights_of(modules)


def masters_of(pipe: Pipeline) -> Named:
    return {
        (stage, name): parameter.detach().clone()
        for stage, weights in pipe._assembly.weights.items()
        for name, parameter in weights.trained.items()
    }


def train_masters(context: RankContext, schedule: Schedule, own_step: bool) -> Any:
    """With the update of the pipeline, or with a step of the trainer's own."""
    torch.set_num_threads(1)
    options = {"build_stage": make_bfloat16_stage, "optimizer": None if own_step else sgd, "share_loss": True}
    with make(context, schedule, master_weights=True, **options) as pipe:
        assert {parameter.dtype for _, parameter in pipe.named_parameters()} == {torch.float32}
        own, losses = sgd(pipe.named_parameters()), []
        for x, y in BATCHES:
            if own_step:
                losses.append(pipe.forward_backward(x.bfloat16(), y).item())
                own.step()
                own.zero_grad()
            else:
                losses.append(pipe.train_step(x.bfloat16(), y).item())
        pipe.eval_step(x.bfloat16(), y)
        return losses, masters_of(pipe), weights_of(pipe.modules)


@under(ALL)
@pytest.mark.parametrize("own_step", [False, True])
def test_masters_and_sums_are_in_float32(schedule: Schedule, own_step: bool) -> None:
    """The stages compute with the rounded masters, whoever has made the step."""
    results = on_threads(train_masters, schedule, own_step)
    losses, masters, weights = train_masters_plainly(schedule.num_stages)
    for own, _, _ in results:
        assert own == pytest.approx(losses, rel=1e-4)
    assert_close([own for _, own, _ in results], masters, 1e-4)
    for _, own_masters, own_weights in results:
        assert {key for key in own_weights if key not in own_masters} == {
            key for key in own_weights if key[1] == "norm.bias"
        }
        for key, master in own_masters.items():
            assert torch.equal(own_weights[key], master.to(weights[key].dtype))


def test_sums_in_bfloat16_would_be_seen() -> None:
    """The tolerance above is finer than what it must tell apart."""
    (_, masters, _), (_, coarse, _) = train_masters_plainly(4), train_masters_plainly(4, torch.bfloat16)
    assert max((coarse[key] - master).abs().max().item() for key, master in masters.items()) > 3e-4


class LowBuild(Build):
    """The tied model in bfloat16."""

    def __call__(self, stage: int) -> nn.Module:
        return super().__call__(stage).bfloat16()


def train_tied_masters(context: RankContext, schedule: Schedule) -> tuple[Named, Named]:
    options = {"build_stage": LowBuild(schedule.num_stages), "loss_fn": sum_and_count, "tied": TIED, "max_norm": 0.5}
    with make(context, schedule, master_weights=True, optimizer=torch.optim.Adam, **options) as pipe:
        for step in range(5):
            pipe.train_step(*make_text(9, step))
        return masters_of(pipe), weights_of(pipe.modules)


@under(ONE_COPY + TWO_COPIES)
def test_masters_of_tied_and_replicated_weights_stay_bit_equal(schedule: Schedule) -> None:
    results = on_threads(train_tied_masters, schedule)
    last = schedule.num_stages - 1
    for of_ranks in zip(*results):  # masters, then what computes
        found = together(of_ranks)
        assert torch.equal(found[0, "embedding.weight"], found[last, "head.weight"])


@pytest.mark.parametrize("autocast", [torch.int8, torch.float32, "bf16"])
def test_autocast_to_what_it_cannot_is_refused(autocast: Any) -> None:
    with pytest.raises(ValueError, match="autocast is torch.bfloat16, torch.float16 or None: got"):
        on_threads(train_autocasting, ONE_COPY[0], make_float_stage, autocast)
