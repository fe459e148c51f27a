"""What a trainer's calls mean stays so where batches overlap: losses, rates, norms, overflows, counts, refusals."""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from delayed import (
    OPTIMIZERS,
    TOLERANCE,
    Case,
    Trained,
    make_pipeline,
    newest_of,
    train_delayed,
    train_rank,
)
from plain import make_batch, make_stage, momentum, squared_error
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.engine.executor import Executor
from stagewright.engine.run import Run
from stagewright.schedules import ScheduleError, create, simulate
from stagewright.schedules.windows import Windows, later

ASYNCHRONOUS: Sequence[tuple[str, dict[str, Any]]] = [
    ("2bw", {}),
    ("2bw-interleaved", {"num_chunks": 2}),
    ("pipedream", {}),
    ("pipedream", {"vertical_sync": True}),
]


def on_threads(function: Any, num_ranks: int, *args: Any) -> list[Any]:
    return launch_local(function, num_ranks, backend="threads", args=args)


# Losses


def losses_of_rank(context: RankContext, case: Case) -> list[float | None]:
    with make_pipeline(context, case, share_loss=False) as pipe:
        losses = [pipe.train_step(*batch) for batch in case.batches]
        assert not any(loss.requires_grad for loss in losses if loss is not None)
        return [None if loss is None else loss.item() for loss in losses]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_step_gives_the_loss_of_its_own_batch(num_ranks: int) -> None:
    """Where the last stage lives: the batch's forwards are all done there when train_step returns."""
    case = Case(num_ranks, 4, num_batches=5)
    *others, last = on_threads(losses_of_rank, num_ranks, case)
    assert last == pytest.approx(train_delayed(case).losses, rel=TOLERANCE)
    assert others == [[None] * 5] * (num_ranks - 1)


def sum_count_and_metrics(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    counts = target[:, 0] > -0.5
    return ((output - target) ** 2).mean(1)[counts].sum(), counts.sum(), {"largest": output.detach().abs().max()}


def count_rows(context: RankContext, loss_counts: bool) -> tuple[list[Tensor | None], list[dict[str, Tensor]]]:
    with make_pipeline(context, Case(3, 3), loss_fn=sum_count_and_metrics, loss_counts=loss_counts) as pipe:
        steps = [(pipe.train_step(*make_batch(8, step)), pipe.metrics) for step in range(2)]
        return [loss for loss, _ in steps], [metrics for _, metrics in steps]


def test_losses_may_be_sums_with_counts_and_have_metrics() -> None:
    """The first two batches still run on the initial weights."""
    model = nn.Sequential(*map(make_stage, range(3)))
    for losses, metrics in on_threads(count_rows, 3, True):
        for step in range(2):
            x, y = make_batch(8, step)
            total, count, _ = sum_count_and_metrics(model(x), y)
            assert losses[step].item() == pytest.approx((total / count).item(), rel=TOLERANCE)
            parts = [
                sum_count_and_metrics(model(part), targets)
                for part, targets in zip(x.split([3, 3, 2]), y.split([3, 3, 2]))
            ]
            mean = sum(metrics_of["largest"] * number for _, number, metrics_of in parts) / count
            assert metrics[step]["largest"].item() == pytest.approx(mean.item(), rel=TOLERANCE)


def test_counts_must_be_announced() -> None:
    """A window that has begun without scalars cannot get them any more."""
    with pytest.raises(TypeError, match=r"must know beforehand that it does; give the Pipeline loss_counts=True"):
        on_threads(count_rows, 3, False)


# Learning rates


def set_rates(context: RankContext, make: Any, rates: Sequence[float]) -> dict[tuple[int, str], Tensor]:
    """A rate a batch, as a trainer without a scheduler sets it; each is gone again when its update is made."""
    case = Case(context.num_ranks, context.num_ranks)
    with Pipeline(
        make_stage,
        schedule="2bw",
        num_microbatches=case.num_microbatches,
        loss_fn=squared_error,
        optimizer=make,
        dynamic_shapes=True,
        transport=context.transport,
    ) as pipe:
        for rate, batch in zip(rates, case.batches):
            assert pipe.optimizer is not None
            for group in pipe.optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            pipe.train_step(*batch)
        return newest_of(pipe)


def set_rates_plainly(num_ranks: int, make: Any, rates: Sequence[float]) -> dict[tuple[int, str], Tensor]:
    """The delayed rule, with the batch's rate at its update."""
    case = Case(num_ranks, num_ranks)
    modules = [make_stage(stage) for stage in range(num_ranks)]
    model = nn.Sequential(*modules)
    parameters, optimizer = list(model.parameters()), make(list(model.named_parameters()))
    versions = [[parameter.detach().clone() for parameter in parameters]]
    for step, (rate, (x, y)) in enumerate(zip(rates, case.batches)):
        put(parameters, versions[max(step - 1, 0)])
        optimizer.zero_grad()
        squared_error(model(x), y).backward()
        put(parameters, versions[step])
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        versions.append([parameter.detach().clone() for parameter in parameters])
    return {(stage, name): weight for stage, module in enumerate(modules) for name, weight in module.named_parameters()}


@torch.no_grad()
def put(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values):
        parameter.copy_(value)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=1.0, momentum=0.5)


def sgd_with_tensor_rate(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=torch.tensor(1.0, dtype=torch.float64))


class Counting(torch.optim.SGD):
    """Counts its steps among its settings, as some do, and lets each be a little smaller."""

    def __init__(self, named: Any) -> None:
        super().__init__(named, lr=1.0)
        for group in self.param_groups:
            group["count"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"] / group["count"])


RATES = [0.03, 0.01, 0.0, 0.05, 0.002, 0.04]


@pytest.mark.parametrize("make", [sgd, Counting], ids=["numbers", "counts"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_update_has_the_rate_that_was_set_when_its_batch_was_given(num_ranks: int, make: Any) -> None:
    """Although it is made when the next batch, with its own rate, is there. What an optimizer itself counts goes on."""
    expected = set_rates_plainly(num_ranks, make, RATES)
    for weights in on_threads(set_rates, num_ranks, make, RATES):
        for key, weight in weights.items():
            torch.testing.assert_close(weight, expected[key], rtol=TOLERANCE, atol=TOLERANCE)


def test_a_rate_may_be_a_tensor_that_is_changed_in_place() -> None:
    weights = [together(on_threads(set_rates, 3, make, RATES)) for make in (sgd_with_tensor_rate, OPTIMIZERS["adam"])]
    for key, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][key], rtol=TOLERANCE, atol=TOLERANCE)


def together(of_ranks: Sequence[dict[tuple[int, str], Tensor]]) -> dict[tuple[int, str], Tensor]:
    return {key: weight for weights in of_ranks for key, weight in weights.items()}


def test_schedulers_do_not_warn() -> None:
    """On the first ranks they go on before the first update is made; the rate of that has been noted."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        on_threads(train_rank, 3, Case(3, 3, num_batches=3, decays=True))


# Norms and overflows


def norms_of_rank(context: RankContext, case: Case) -> list[float | None]:
    with make_pipeline(context, case) as pipe:
        norms = []
        for batch in case.batches:
            pipe.train_step(*batch)
            pipe.flush()
            norms.append(pipe.grad_norm)
        return norms


def test_norms_are_those_of_all_stages_before_clipping() -> None:
    case = Case(3, 3, num_batches=5, max_norm=0.2)
    expected = train_delayed(case).norms
    assert min(norm for norm in expected if norm is not None) > 0.2  # it does clip
    for norms in on_threads(norms_of_rank, 3, case):
        assert norms == pytest.approx(expected, rel=TOLERANCE)


OVERFLOWING = (2, 3, 6)


def overflow(context: RankContext, case: Case) -> tuple[Trained, float]:
    """Some batches have targets without bounds."""
    result = Trained()
    with make_pipeline(context, case, loss_scale="dynamic") as pipe:
        for step, (x, y) in enumerate(case.batches):
            pipe.train_step(x, y * float("inf") if step in OVERFLOWING else y)
        result.weights = newest_of(pipe)
        return result, pipe.loss_scale


def skip_plainly(case: Case, num_stages: int) -> dict[tuple[int, str], Tensor]:
    """The delayed rule, whose update of a batch that overflows makes a version that is like the one before."""
    modules = [make_stage(stage) for stage in range(num_stages)]
    model = nn.Sequential(*modules)
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS[case.optimizer](list(model.named_parameters()))
    versions = [[parameter.detach().clone() for parameter in parameters]]
    for step, (x, y) in enumerate(case.batches):
        if step not in OVERFLOWING:
            put(parameters, versions[max(step - 1, 0)])
            optimizer.zero_grad()
            squared_error(model(x), y).backward()
            put(parameters, versions[step])
            if case.max_norm is not None:
                nn.utils.clip_grad_norm_(parameters, case.max_norm)
            optimizer.step()
        versions.append([parameter.detach().clone() for parameter in parameters])
    return {(stage, name): weight for stage, module in enumerate(modules) for name, weight in module.named_parameters()}


@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 2), (2, 1), (3, 3), (4, 3), (4, 6)])
def test_an_overflow_skips_its_update_on_all_ranks(
    num_ranks: int, num_microbatches: int, max_norm: float | None
) -> None:
    """And halves the scale, while batches that were scaled by the old one are still in flight."""
    case = Case(num_ranks, num_microbatches, num_batches=9, optimizer="adam", max_norm=max_norm)
    assert_skips(case, num_ranks)


def test_microbatches_of_one_update_have_one_scale() -> None:
    """Under 2bw-interleaved an update of the batch before comes among the forwards of the last stage."""
    assert_skips(Case(2, 4, "2bw-interleaved", {"num_chunks": 2}, 9, "sgd"), 4)


def assert_skips(case: Case, num_stages: int) -> None:
    expected = skip_plainly(case, num_stages)
    for result, scale in on_threads(overflow, case.num_ranks, case):
        assert scale == 65536 / 2 ** len(OVERFLOWING)
        for key, weight in result.weights.items():
            torch.testing.assert_close(weight, expected[key], rtol=TOLERANCE, atol=TOLERANCE)


# What runs


def log_runs(context: RankContext, schedule: Any, drains: Sequence[int]) -> None:
    with Pipeline(
        make_stage, schedule=schedule, loss_fn=squared_error, optimizer=momentum, transport=context.transport
    ) as pipe:
        for step in range(drains[-1]):
            pipe.train_step(*make_batch(8, step))
            if step + 1 in drains:
                pipe.flush()


@pytest.mark.parametrize(("name", "options"), ASYNCHRONOUS)
@pytest.mark.parametrize("drains", [(3,), (1, 2, 9)], ids=str)
def test_what_runs_is_the_program_instruction_for_instruction(
    name: str, options: dict[str, Any], drains: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That which is drawn, proved and simulated."""
    ran: dict[int, list[str]] = {rank: [] for rank in range(3)}
    run_before = Executor.run

    def run_and_note(executor: Executor, run: Run) -> None:
        run_before(executor, run)
        rank = executor._transport.rank
        numbers = run.later_microbatches, run.later_versions
        assert len(run.times) == len(executor.program.streams[rank])
        ran[rank] += [str(later(instruction, *numbers)) for instruction in executor.program.streams[rank]]

    monkeypatch.setattr(Executor, "run", run_and_note)
    schedule = create(name, num_ranks=3, num_microbatches=4, **options)
    on_threads(log_runs, 3, schedule, drains)
    program = Windows(schedule).program(drains)
    assert ran == {rank: list(map(str, stream)) for rank, stream in enumerate(program.streams)}
    if len(drains) == 1:
        assert program == schedule.program(drains[0])


class Watching(nn.Module):
    """Notes how many microbatches its stage has stashed."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.inner = make_stage(stage)
        self.stages: dict[int, Any] = {}
        self.peak = 0

    def forward(self, x: Tensor) -> Tensor:
        self.peak = max(self.peak, sum(len(stage.stash) for stage in self.stages.values()))
        y: Tensor = self.inner(x)
        return y


def peak_of_rank(context: RankContext, schedule: Any) -> int:
    with Pipeline(
        Watching, schedule=schedule, loss_fn=squared_error, optimizer=momentum, transport=context.transport
    ) as pipe:
        for module in pipe.modules.values():
            assert isinstance(module, Watching)
            module.stages = pipe._stages
        for step in range(5):
            pipe.train_step(*make_batch(8, step))
        return max(module.peak for module in pipe.modules.values() if isinstance(module, Watching))


@pytest.mark.parametrize(("name", "options"), ASYNCHRONOUS)
def test_so_many_microbatches_are_in_flight(name: str, options: dict[str, Any]) -> None:
    """P-r on rank r, whatever comes after them: as simulated."""
    schedule = create(name, num_ranks=4, num_microbatches=5, **options)
    peaks = on_threads(peak_of_rank, 4, schedule)
    assert peaks == list(simulate(schedule.program(5)).peak_stash)
    if name != "2bw-interleaved":
        assert peaks == [4, 3, 2, 1]


def timeline_of_rank(context: RankContext) -> tuple[list[str], float]:
    with make_pipeline(context, Case(2, 2)) as pipe:
        for batch in Case(2, 2).batches[:3]:
            pipe.train_step(*batch)
        timeline = pipe.trace()
        return [str(event.instruction) for event in timeline.events[0]], timeline.makespan


def test_a_window_can_be_traced() -> None:
    """The last batch's, on all ranks."""
    window = Windows(create("2bw", num_ranks=2, num_microbatches=2)).window(2, 0)
    expected = [str(instruction) for instruction in window.streams[0]]
    for tokens, makespan in on_threads(timeline_of_rank, 2):
        assert tokens == expected
        assert makespan > 0


# Refused


def test_gradients_of_one_batch_cannot_be_had() -> None:
    """There is no moment at which those of a batch, and no others, lie ready."""
    with Pipeline(
        {0: make_stage(0)}, schedule="2bw", num_microbatches=2, loss_fn=squared_error, optimizer=momentum
    ) as pipe:
        for call in (lambda: pipe.forward_backward(*make_batch(4, 0)), lambda: pipe.clip_grad_norm_(1.0)):
            with pytest.raises(ScheduleError) as refusal:
                call()
            assert str(refusal.value) == (
                "2bw never stops between batches, so there is no moment at which a batch's gradients could be handed "
                "out: call train_step, with max_norm=… to clip them, or take a synchronous schedule"
            )
        pipe.train_step(*make_batch(4, 0))


def test_an_optimizer_is_needed() -> None:
    with (
        Pipeline({0: make_stage(0)}, schedule="2bw", num_microbatches=2, loss_fn=squared_error) as pipe,
        pytest.raises(ValueError, match="train_step makes an update: give the Pipeline an optimizer"),
    ):
        pipe.train_step(*make_batch(4, 0))


def start(context: RankContext, num_microbatches: int, **options: Any) -> None:
    Pipeline(
        make_stage,
        num_microbatches=num_microbatches,
        loss_fn=squared_error,
        optimizer=momentum,
        transport=context.transport,
        **options,
    )


def start_2bw(context: RankContext) -> None:
    start(context, 2, schedule="2bw")


def test_too_few_microbatches_are_refused_with_the_remedy() -> None:
    with pytest.raises(ScheduleError, match="got 2 on 4 ranks; use 3 or more microbatches, or at most 3 ranks"):
        on_threads(start_2bw, 4)


NEEDS_OTHERS: Sequence[dict[str, Any]] = [
    {"max_norm": 1.0},
    {"loss_scale": 8.0},
    {"loss_scale": "dynamic"},
    {"loss_counts": True},
    {"tied": [["stage0.widen.weight", "stage1.widen.weight"]]},
]


def start_pipedream(context: RankContext, num_microbatches: int, options: dict[str, Any]) -> None:
    start(context, num_microbatches, schedule="pipedream", **options)


@pytest.mark.parametrize("options", NEEDS_OTHERS, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_pipedream_refuses_what_an_update_of_all_stages_would_need(
    options: dict[str, Any], num_microbatches: int
) -> None:
    with pytest.raises(ScheduleError, match="updates each stage by itself after every microbatch, .* need 2bw or"):
        on_threads(start_pipedream, 2, num_microbatches, options)
