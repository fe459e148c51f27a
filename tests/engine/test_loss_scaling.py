"""Loss scaling: an overflow on one stage makes every rank skip the step and halve the scale, all together."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from meanings import ALL, ONE_COPY, Named, assert_close, gradients_of, make_batches, on_threads, under, weights_of
from plain import make_batch, make_stage, squared_error
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext
from stagewright.engine.updates.agreement import LossScale
from stagewright.schedules import Schedule, create

START = 65536.0
BATCHES = make_batches(4)


class _Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[0, 0] = torch.inf  # one element in one microbatch is enough
        return gradient


class Explosive(nn.Module):
    """A stage whose gradient overflows when it is told so; that of no later stage does."""

    def __init__(self, stage: int, explosive: int) -> None:
        super().__init__()
        self.block = make_stage(stage)
        self.is_explosive = stage == explosive

    def forward(self, x: Tensor, explode: bool = False) -> Tensor:
        output = self.block(x)
        return _Explode.apply(output) if explode and self.is_explosive else output


class Build:
    """stage -> module."""

    def __init__(self, explosive: int) -> None:
        self._explosive = explosive

    def __call__(self, stage: int) -> nn.Module:
        return Explosive(stage, self._explosive)


def adam(named: Any) -> torch.optim.Optimizer:
    """Counts its steps."""
    return torch.optim.Adam(named, lr=0.01)


def make(context: RankContext, schedule: Schedule, **options: Any) -> Pipeline:
    torch.set_num_threads(1)
    return Pipeline(schedule=schedule, transport=context.transport, **{"loss_fn": squared_error, **options})


def explode_in_step_1(context: RankContext, schedule: Schedule, explosive: int, loss_scale: Any) -> Any:
    scales, skipped, weights = [], [], []
    with make(context, schedule, build_stage=Build(explosive), optimizer=adam, loss_scale=loss_scale) as pipe:
        for step, batch in enumerate(BATCHES):
            pipe.train_step(*batch, explode=step == 1)
            scales.append(pipe.loss_scale)
            skipped.append(pipe.overflowed)
            weights.append(weights_of(pipe.modules))
        assert pipe.optimizer is not None
        steps = {int(state["step"]) for state in pipe.optimizer.state.values()}
    return scales, skipped, steps, weights


@under(ALL)
@pytest.mark.parametrize("explosive", [0, -1])
def test_an_overflow_on_one_stage_makes_every_rank_skip_the_step(schedule: Schedule, explosive: int) -> None:
    """The scale halves together, 65536 -> 32768, optimizers have not moved, and training goes on as if nothing were."""
    results = on_threads(explode_in_step_1, schedule, explosive % schedule.num_stages, "dynamic")
    for scales, skipped, steps, weights in results:
        assert scales == [START, START / 2, START / 2, START / 2]
        assert skipped == [False, True, False, False]
        assert steps == {3}
        for key, weight in weights[0].items():
            assert torch.equal(weight, weights[1][key])
    modules = {stage: Explosive(stage, -1) for stage in range(schedule.num_stages)}
    model = nn.Sequential(*modules.values())
    optimizer = adam(model.parameters())
    for x, y in (BATCHES[0], BATCHES[2], BATCHES[3]):
        optimizer.zero_grad()
        squared_error(model(x), y).backward()
        optimizer.step()
    assert_close([weights[3] for _, _, _, weights in results], weights_of(modules))


@under(ONE_COPY)
def test_a_fixed_scale_skips_and_stays(schedule: Schedule) -> None:
    for scales, skipped, steps, _ in on_threads(explode_in_step_1, schedule, 0, 1024):
        assert scales == [1024.0] * 4
        assert skipped == [False, True, False, False]
        assert steps == {3}


def accumulate(context: RankContext, schedule: Schedule) -> tuple[list[bool], list[float], list[Named]]:
    """A trainer that steps by itself: the second of three batches overflows."""
    skipped, scales, gradients = [], [], []
    with make(context, schedule, build_stage=Build(1), loss_scale="dynamic") as pipe:
        for step, batch in enumerate(BATCHES[:3]):
            pipe.forward_backward(*batch, explode=step == 1)
            skipped.append(pipe.overflowed)
            scales.append(pipe.loss_scale)
            gradients.append(gradients_of(pipe.modules))
    return skipped, scales, gradients


@under(ALL)
def test_a_batch_that_overflows_adds_nothing_to_accumulated_gradients(schedule: Schedule) -> None:
    """Every rank hears of it, and the gradients are there without the scale."""
    results = on_threads(accumulate, schedule)
    for skipped, scales, gradients in results:
        assert skipped == [False, True, False]
        assert scales == [START, START / 2, START / 2]
        assert gradients[1].keys() == gradients[0].keys()
        for key, gradient in gradients[0].items():
            assert torch.equal(gradients[1][key], gradient)
    modules = {stage: Explosive(stage, -1) for stage in range(schedule.num_stages)}
    model = nn.Sequential(*modules.values())
    for x, y in (BATCHES[0], BATCHES[2]):
        squared_error(model(x), y).backward()
    assert_close([gradients[2] for _, _, gradients in results], gradients_of(modules))


def overflow_naturally(context: RankContext, schedule: Schedule) -> tuple[list[float], Named]:
    """In float16 the gradient of the first steps is too large for the first scale."""
    scales = []
    options = {"autocast": torch.float16, "loss_scale": "dynamic", "optimizer": plain_sgd}
    with make(context, schedule, build_stage=build_steep, **options) as pipe:
        for step in range(6):
            pipe.train_step(*single(step))
            scales.append(pipe.loss_scale)
        return scales, weights_of(pipe.modules)


def plain_sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=1e-3)


def build_steep(stage: int) -> nn.Module:
    """Ends in a linear, so that float16 is what crosses."""
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    generator = torch.Generator().manual_seed(stage)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.8 * torch.randn(parameter.shape, generator=generator))
    return module


def single(step: int) -> tuple[Tensor, Tensor]:
    """Eight rows: four equal microbatches."""
    x, y = make_batch(8, step)
    return x.float(), 5 * y.float()


@under(ONE_COPY)
def test_scales_go_as_those_of_torchs_own_scaler(schedule: Schedule) -> None:
    """A plain loop over the microbatches in float16 with torch.amp.GradScaler."""
    results = on_threads(overflow_naturally, schedule)
    modules = {stage: build_steep(stage) for stage in range(4)}
    model = nn.Sequential(*modules.values())
    optimizer, scaler, scales = plain_sgd(model.parameters()), torch.amp.GradScaler("cpu"), []
    for step in range(6):
        optimizer.zero_grad()
        for x, y in zip(*(tensor.split(2) for tensor in single(step))):
            with torch.autocast("cpu", torch.float16):
                loss = squared_error(model(x), y) / 4
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert START / 2**5 < scales[-1] < START  # some steps overflow, and some do not
    for own, _ in results:
        assert own == scales
    assert_close([weights for _, weights in results], weights_of(modules), 1e-5)


def half_precision_error(output: Tensor, target: Tensor) -> Tensor:
    """A loss of a type that cannot hold the scale."""
    return ((output - target.half()) ** 2).mean()


def train_half_precision_loss(context: RankContext, schedule: Schedule) -> list[float]:
    options = {"autocast": torch.float16, "loss_scale": "dynamic", "optimizer": plain_sgd, "build_stage": build_steep}
    with make(context, schedule, loss_fn=half_precision_error, **options) as pipe:
        scales = []
        for step in range(6):
            pipe.train_step(*single(step))
            scales.append(pipe.loss_scale)
        return scales


def test_a_scale_too_large_for_the_type_of_the_loss_is_an_overflow() -> None:
    """65536 is no float16."""
    schedule = create("none", num_ranks=1, num_microbatches=1)
    (scales,) = on_threads(train_half_precision_loss, schedule)
    assert scales[0] == START / 2
    assert scales[-1] == scales[-2] > 1


def test_the_scale_doubles_after_2000_good_steps() -> None:
    scale = LossScale.of("dynamic")
    assert scale is not None
    for _ in range(1999):
        scale.update(overflow=False)
    scale.update(overflow=True)
    for _ in range(1999):
        scale.update(overflow=False)
    assert scale.value == START / 2
    scale.update(overflow=False)
    assert scale.value == START
    for _ in range(2000):
        scale.update(overflow=False)
    assert scale.value == 2 * START


def half(stage: int) -> nn.Module:
    return make_stage(stage).half()


def test_half_precision_gradients_cannot_be_unscaled() -> None:
    """What the scale has kept from vanishing would vanish when it is divided by; torch refuses it too."""
    schedule = create("1f1b", num_ranks=2, num_microbatches=4)
    with pytest.raises(ValueError, match=r"norm.weight of stage [01] is float16: .* give master_weights=True"):
        on_threads(make_only, schedule, {"loss_scale": "dynamic", "build_stage": half})


@pytest.mark.parametrize("loss_scale", [0, -2.0, float("inf"), "static"])
def test_a_scale_that_cannot_be_is_refused(loss_scale: Any) -> None:
    schedule = create("1f1b", num_ranks=2, num_microbatches=4)
    options = {"loss_scale": loss_scale, "build_stage": make_stage}
    with pytest.raises(ValueError, match="loss_scale is a positive number or .dynamic.: got"):
        on_threads(make_only, schedule, options)


def make_only(context: RankContext, schedule: Schedule, options: dict[str, Any]) -> None:
    make(context, schedule, **options).close()


def explode_without_flush(context: RankContext, schedule: Schedule) -> tuple[list[bool], Named]:
    skipped = []
    with make(context, schedule, build_stage=Build(0), optimizer=adam, loss_scale="dynamic") as pipe:
        for step, batch in enumerate(make_batches(6)):
            pipe.train_step(*batch, explode=step == 2)
            skipped.append(pipe.overflowed)
        pipe.flush()
        return skipped, weights_of(pipe.modules)


def test_without_a_flush_the_batches_under_way_keep_the_scale_that_they_began_with() -> None:
    """The overflow of batch 2 is known when the losses of later ones have been scaled, and makes no version."""
    results = on_threads(explode_without_flush, create("2bw", num_ranks=2, num_microbatches=4))
    for skipped, _ in results:
        assert sum(skipped) == 1
    modules = {stage: Explosive(stage, -1) for stage in range(2)}
    model = nn.Sequential(*modules.values())
    optimizer = adam(model.parameters())
    versions = [deepcopy(model.state_dict())]
    for step, (x, y) in enumerate(make_batches(6)):
        newest = versions[-1]
        model.load_state_dict(versions[max(step - 1, 0)])
        optimizer.zero_grad()
        squared_error(model(x), y).backward()
        model.load_state_dict(newest)
        if step != 2:
            optimizer.step()
        versions.append(deepcopy(model.state_dict()))
    assert_close([weights for _, weights in results], weights_of(modules))
