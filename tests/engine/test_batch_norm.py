"""Batch norms: running statistics microbatch by microbatch, or deferred to those of the whole batch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from delayed import Case, Versions, version_of
from launching import Kind, launch_on
from meanings import (
    ALL,
    ONE_COPY,
    Named,
    assert_close,
    buffers_of,
    make_batches,
    on_threads,
    together,
    under,
    weights_of,
)
from normed import Build, Norms, train_overlapping
from plain import make_batch, momentum, squared_error
from torch import Tensor, nn
from torch.nn import functional

from stagewright.engine import Pipeline, RankContext
from stagewright.schedules import Schedule, create

BATCHES = make_batches(3)
MICROBATCHES = 4
# Momentum of the batch norms, and which microbatches are computed again.
WAYS = [(0.1, "off"), (None, "full"), (0.3, 1)]


def train(context: RankContext, schedule: Schedule, build: Build, options: dict[str, Any]) -> list[Named]:
    """Buffers and weights after an update with each batch, and the buffers after evaluations and one more batch."""
    torch.set_num_threads(1)
    transport = context.transport
    with Pipeline(
        build, schedule=schedule, loss_fn=squared_error, optimizer=momentum, transport=transport, **options
    ) as pipe:
        pipe.eval_step(*make_batch(5, 9), num_microbatches=2)
        for batch in BATCHES:
            pipe.train_step(*batch)
        after = buffers_of(pipe.modules)
        pipe.eval_step(*make_batch(7, 9), num_microbatches=3)
        pipe.predict(BATCHES[0][0])
        assert together([after, buffers_of(pipe.modules)])
        pipe.forward_backward(*BATCHES[0])
        return [after, weights_of(pipe.modules), buffers_of(pipe.modules)]


def train_plainly(num_stages: int, factor: float | None, *, deferred: bool) -> list[Named]:
    """A loop over microbatches; deferred, torch's own batch norm then sees all rows of the batch at once."""
    modules = {stage: Norms(stage, factor) for stage in range(num_stages)}
    model = nn.Sequential(*modules.values())
    optimizer = momentum(model.parameters())
    learning = [norm for module in modules.values() for norm in (module.flat, module.long)]
    seen = [Seen(norm, deferred=deferred) for norm in learning]
    results: list[Named] = []
    for step, (x, y) in enumerate([*BATCHES, BATCHES[0]]):
        optimizer.zero_grad()
        for part, target in zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES)):
            (squared_error(model(part), target) * len(part) / len(x)).backward()
        for norm in seen:
            norm.end_batch()
        if step < len(BATCHES):
            optimizer.step()
        if step >= len(BATCHES) - 1:
            results += [buffers_of(modules), weights_of(modules)]
    return results[:3]


class Seen:
    """What a batch norm of the plain loop has seen of a batch."""

    def __init__(self, norm: nn.BatchNorm1d, *, deferred: bool) -> None:
        self._norm = norm
        self._inputs: list[Tensor] = []
        self._deferred = deferred
        if deferred:
            norm.register_forward_pre_hook(self._note, with_kwargs=True)
            norm.track_running_stats = False

    def _note(self, norm: nn.Module, args: Sequence[Tensor], kwargs: dict[str, Tensor]) -> None:
        if norm.training:
            self._inputs.append((args or tuple(kwargs.values()))[0].detach())

    def end_batch(self) -> None:
        if self._deferred:
            norm = self._norm
            norm.num_batches_tracked += 1
            factor = 1 / norm.num_batches_tracked.item() if norm.momentum is None else norm.momentum
            whole = torch.cat(self._inputs)
            functional.batch_norm(whole, norm.running_mean, norm.running_var, training=True, momentum=factor)
            self._inputs.clear()


@under(ONE_COPY)
@pytest.mark.parametrize(("factor", "recompute"), WAYS)
def test_every_microbatch_is_a_batch_to_a_batch_norm(schedule: Schedule, factor: float | None, recompute: Any) -> None:
    """In order, and once, also where it is computed twice; evaluation reads and does not write."""
    results = on_threads(train, schedule, Build(factor), {"recompute": recompute})
    for own, plain in zip(zip(*results), train_plainly(schedule.num_stages, factor, deferred=False)):
        assert_close(own, plain)


@under(ALL)
@pytest.mark.parametrize(("factor", "recompute"), WAYS)
def test_deferred_statistics_are_those_of_the_whole_batch(
    schedule: Schedule, factor: float | None, recompute: Any
) -> None:
    """Mean, unbiased variance, momentum and the number of batches as torch has them; copies see both directions."""
    options = {"recompute": recompute, "deferred_batch_norm": True}
    results = on_threads(train, schedule, Build(factor), options)
    plain = train_plainly(schedule.num_stages, factor, deferred=True)
    for own, expected in zip(zip(*results), plain):
        assert_close(own, expected)
    assert plain[0][0, "flat.num_batches_tracked"] == len(BATCHES)


# Where batches overlap: the statistics of a batch are there when its train_step ends, and its backwards are not done.


def train_overlapping_plainly(case: Case, dp: int) -> list[Named]:
    """The loop that applies each schedule's own rule of versions."""
    modules = [Norms(stage, None) for stage in range(case.num_stages)]
    model = nn.Sequential(*modules)
    optimizer = momentum(model.parameters())
    seen = [Seen(norm, deferred=True) for module in modules for norm in (module.flat, module.long)]
    versions, results = Versions(modules), []
    made = drained = 0
    for step, batch in enumerate(case.batches):
        shares = [tensor.tensor_split(dp) for tensor in batch]
        parts = [
            [*zip(x.tensor_split(case.num_microbatches), y.tensor_split(case.num_microbatches))]
            for x, y in zip(*shares)
        ]
        per_update = case.per_update if case.schedule == "pipedream" else case.num_microbatches
        for first in range(0, case.num_microbatches, per_update):
            of_update = [part for of_replica in parts for part in of_replica[first : first + per_update]]
            for stage in range(case.num_stages):
                versions.use(stage, version_of(case, stage, step, made, drained))
            rows = sum(len(x) for x, _ in of_update)
            for x, y in of_update:
                (squared_error(model(x), y) * len(x) / rows).backward()
            versions.use_newest()
            optimizer.step()
            optimizer.zero_grad()
            versions.keep()
            made += 1
        for norm in seen:
            norm.end_batch()
        results.append(buffers_of(dict(enumerate(modules))))
        drained = made if step in case.actions else drained
    versions.use_newest()
    return [*results, weights_of(dict(enumerate(modules)))]


def overlapping(schedule: str, replicas: tuple[int, ...], num_microbatches: int, **more: Any) -> Case:
    options = {"replicas": replicas, **more.pop("options", {})}
    return Case(sum(replicas), num_microbatches, schedule, options, 6, actions={2: "evaluate"}, **more)


OVERLAPPING = [
    (overlapping("2bw", (1, 1), 3), 1),
    (overlapping("2bw", (2, 1), 3), 1),
    (overlapping("2bw", (1, 2), 5, recompute="full"), 1),
    (overlapping("2bw", (1, 2, 1), 4), 1),
    (overlapping("2bw", (3, 2), 7), 1),
    (overlapping("2bw", (2, 1), 2, rows=11), 2),
    (overlapping("pipedream", (1, 1), 3), 1),
    (overlapping("pipedream", (2, 1), 4, per_update=2, delays=(2, 0), recompute=1), 1),
    (overlapping("pipedream", (2, 2), 2, per_update=2, delays=(1, 0)), 1),
    (overlapping("pipedream", (2, 1), 2, per_update=2, delays=(2, 2), options={"vertical_sync": True}), 1),
    (overlapping("pipedream", (1, 2, 1), 4, per_update=2, delays=(2, 2, 0)), 1),
    (overlapping("1f1b", (2, 1), 3), 1),
    (overlapping("1f1b", (3, 1), 2), 1),  # a copy that sees nothing
    (overlapping("1f1b", (1, 2), 4, rows=19), 2),
]


def overlapping_label(value: Any) -> str:
    if not isinstance(value, Case):
        return f"dp{value}"
    return f"{value.schedule}-{'-'.join(map(str, value.options['replicas']))}-M{value.num_microbatches}"


def assert_overlapping_statistics(case: Case, dp: int, kind: Kind = "threads") -> None:
    results = launch_on(kind, train_overlapping, case.num_ranks * dp, (case, dp))
    for of_ranks, expected in zip(zip(*results), train_overlapping_plainly(case, dp), strict=True):
        assert_close(of_ranks, expected, 1e-11)


@pytest.mark.parametrize(("case", "dp"), OVERLAPPING, ids=overlapping_label)
def test_deferred_statistics_of_replicas_are_those_of_the_whole_batch(case: Case, dp: int) -> None:
    """After each batch, on each copy of a stage and in each replica of the pipeline, to the last bit the same."""
    assert_overlapping_statistics(case, dp)


def test_deferred_statistics_of_replicas_in_processes() -> None:
    assert_overlapping_statistics(overlapping("2bw", (2, 1), 3), 1, "gloo")


def step_once(context: RankContext, schedule: Schedule) -> tuple[Named, dict[int, nn.Module]]:
    options = {"loss_fn": squared_error, "transport": context.transport, "deferred_batch_norm": True}
    with Pipeline(Build(0.1), schedule=schedule, **options) as pipe:
        pipe.forward_backward(*BATCHES[0])
        return buffers_of(pipe.modules), pipe.modules


def test_the_first_batch_norm_remembers_what_it_would_without_microbatches() -> None:
    """What it sees does not depend on how the batch is cut. And once the batch is through, it is a plain one again."""
    schedule = create("1f1b", num_ranks=2, num_microbatches=4)
    buffers, modules = on_threads(step_once, schedule)[0]
    norms = Norms(0, 0.1)
    for remembered in (buffers, None):
        norms(BATCHES[0][0])
        if remembered is None:
            modules[0](BATCHES[0][0])
            remembered = buffers_of(modules)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            plain = getattr(norms.flat, name)
            torch.testing.assert_close(remembered[0, f"flat.{name}"], plain, rtol=1e-12, atol=1e-12)


class Failing(Norms):
    """Fails with the third microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise RuntimeError("a row alone")
        return super().forward(x)


def fail_once(context: RankContext, schedule: Schedule) -> list[Named]:
    options = {"loss_fn": squared_error, "transport": context.transport, "deferred_batch_norm": True}
    with Pipeline({0: Failing(0, 0.1)}, schedule=schedule, **options) as pipe:
        before = buffers_of(pipe.modules)
        with pytest.raises(RuntimeError, match="a row alone"):
            pipe.forward_backward(*make_batch(5, 1))
        between = buffers_of(pipe.modules)
        pipe.forward_backward(*make_batch(6, 0))
        return [before, between, buffers_of(pipe.modules)]


def test_of_a_batch_that_fails_nothing_is_remembered() -> None:
    schedule = create("none", num_ranks=1, num_microbatches=3)
    ((before, between, after),) = on_threads(fail_once, schedule)
    assert together([before, between])
    seen = Norms(0, 0.1).linear(make_batch(6, 0)[0]).detach()  # by the first batch norm
    torch.testing.assert_close(after[0, "flat.running_mean"], 0.1 * seen.mean(0), rtol=1e-12, atol=1e-12)
    assert after[0, "flat.num_batches_tracked"] == 1


def build_compiled(stage: int) -> nn.Module:
    return torch.compile(Norms(stage, 0.1))


def build_instance_norm(stage: int) -> nn.Module:
    return nn.InstanceNorm1d(3, track_running_stats=True)


def build_forgetful(stage: int) -> nn.Module:
    return nn.BatchNorm1d(6, track_running_stats=False)


def build_only(context: RankContext, schedule: Schedule, build: Any, deferred: bool) -> None:
    Pipeline(build, schedule=schedule, transport=context.transport, deferred_batch_norm=deferred).close()


@pytest.mark.parametrize(
    ("name", "build", "deferred", "message"),
    [
        ("dualpipe", Build(0.1), False, "statistics of flat would drift apart; give deferred_batch_norm=True, or"),
        ("chimera", build_instance_norm, True, "would drift apart; give track_running_stats=False, or take a schedule"),
        ("1f1b", build_compiled, True, r"stage [01] is compiled, so nobody can look into its batch norms: leave"),
    ],
)
def test_what_would_remember_something_wrong_is_refused(name: str, build: Any, deferred: bool, message: str) -> None:
    schedule = create(name, num_ranks=2, num_microbatches=4)
    with pytest.raises(ValueError, match=message):
        on_threads(build_only, schedule, build, deferred)


@pytest.mark.parametrize(
    ("name", "build", "deferred"),
    [("dualpipe", build_forgetful, False), ("dualpipe", Build(0.1), True), ("1f1b", build_compiled, False)],
)
def test_what_remembers_nothing_or_the_right_thing_is_not(name: str, build: Any, deferred: bool) -> None:
    on_threads(build_only, create(name, num_ranks=2, num_microbatches=4), build, deferred)
