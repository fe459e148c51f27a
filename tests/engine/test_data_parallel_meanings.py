"""What trainers mean must mean the same with replicas: losses that count, clipping, scaling, dropout, and the rest."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest
import torch
from data_parallel import Failing, assert_replicas_equal, fail_in_one_replica, share_of
from launching import launch_on
from normed import Build as Normed
from plain import TOLERANCE, Result, make_batch, make_stage, momentum, note_parameters, squared_error
from scenario import SEED, Scenario, compare
from scenario import train_plainly as train_scenario
from test_loss_scaling import Explosive
from tied import TIED, make_text, mean_over_tokens, sum_and_count
from tied import Build as TiedBuild
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext, launch_local, make_mesh
from stagewright.schedules import Schedule, create

PARTS: Final = (5, 4)


def two_ranks(name: str = "1f1b", num_microbatches: int = 2) -> Schedule:
    """A schedule at the shape of these tests."""
    return create(name, num_ranks=2, num_microbatches=num_microbatches)


def pipeline(context: RankContext, dp: int = 2, **options: Any) -> Pipeline:
    """One rank of two pipelines of two ranks."""
    torch.set_num_threads(1)
    mesh = make_mesh(pp=context.num_ranks // dp, dp=dp, context=context)
    options = {"build_stage": make_stage, "schedule": two_ranks(), "loss_fn": squared_error, **options}
    return Pipeline(mesh=mesh, **options)


def train_text(context: RankContext, parts: Sequence[int], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Losses, norms and weights of a tied language model under a loss that comes as (sum, count)."""
    losses, norms = [], []
    result = Result()
    build = TiedBuild(2)
    with pipeline(
        context, build_stage=build, loss_fn=sum_and_count, optimizer=momentum, tied=TIED, share_loss=True, **options
    ) as pipe:
        for step in range(3):
            loss = pipe.train_step(*share_of(make_text(sum(parts), step), parts, pipe.replica))
            assert loss is not None
            losses.append(loss.item())
            norms.append(pipe.grad_norm)
        note_parameters(result, pipe.modules)
    return losses, norms, result.weights


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_counts_ties_and_clipping_are_those_of_all_replicas(name: str, max_norm: float | None) -> None:
    """In the first replica's rows fewer tokens count than in the other's; the norm counts each weight once."""
    parts = (5, 4)
    options = {"schedule": two_ranks(name, 4 if name == "dualpipe" else 2), "max_norm": max_norm}
    results = launch_on("threads", train_text, 4, (parts, options))
    build = TiedBuild(2, tie=True)
    stages = [build(stage) for stage in range(2)]
    model = nn.Sequential(*stages)
    optimizer = momentum(model.parameters())
    for step in range(3):
        x, y = make_text(sum(parts), step)
        optimizer.zero_grad()
        loss = mean_over_tokens(model(x), y)
        loss.backward()
        norm = None if max_norm is None else nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
        optimizer.step()
        for losses, norms, _ in results:
            assert losses[step] == pytest.approx(loss.item(), rel=TOLERANCE)
            assert norms[step] is None if norm is None else norms[step] == pytest.approx(norm, rel=TOLERANCE)
    for _, _, weights in results:
        for (stage, name_), weight in weights.items():
            expected = dict(stages[stage].named_parameters(remove_duplicate=False))[name_]
            torch.testing.assert_close(weight, expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    for first, other in zip(results[::2], results[1::2], strict=True):
        assert all(torch.equal(first[2][key], other[2][key]) for key in first[2])


def accumulate(context: RankContext, schedule: Schedule) -> tuple[Result, float]:
    result = Result()
    with pipeline(context, schedule=schedule) as pipe:
        for step in range(2):
            pipe.forward_backward(*share_of(make_batch(9, step), PARTS, pipe.replica))
        note_parameters(result, pipe.modules)
        return result, pipe.clip_grad_norm_(0.01)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_gradients_of_several_calls_add_up_and_each_is_summed_once(name: str) -> None:
    model = nn.Sequential(make_stage(0), make_stage(1))
    for step in range(2):
        x, y = make_batch(9, step)
        squared_error(model(x), y).backward()
    gradients = [{name: p.grad for name, p in stage.named_parameters()} for stage in model]
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    for result, own_norm in launch_on("threads", accumulate, 4, (two_ranks(name),)):
        assert own_norm == pytest.approx(norm, rel=TOLERANCE)
        for (stage, key), gradient in result.gradients.items():
            torch.testing.assert_close(gradient, gradients[stage][key], rtol=TOLERANCE, atol=TOLERANCE)


class Forked(nn.Module):
    """Rows whose first number is positive take one weight, others another one; a third is never used."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.block = make_stage(stage)
        generator = torch.Generator().manual_seed(stage)
        for name in ("high", "low", "idle"):
            weight = torch.randn(6, 6, generator=generator, dtype=torch.float64)
            setattr(self, name, nn.Parameter(weight, requires_grad=True))
        self.block.norm.requires_grad_(False)

    def forward(self, x: Tensor, mark: Tensor) -> Tensor:
        y = self.block(x)
        if mark[0] > 0:
            y = y @ self.high
        if mark[-1] <= 0:
            y = y @ self.low
        return y


def train_forked(context: RankContext) -> Result:
    result = Result()
    with pipeline(context, build_stage=Forked, schedule=two_ranks("zb-h1"), optimizer=momentum) as pipe:
        mark = torch.tensor([1.0, 1.0] if pipe.replica == 0 else [-1.0, -1.0]).repeat_interleave(2)
        for step in range(2):
            pipe.train_step(*share_of(make_batch(8, step), (4, 4), pipe.replica), mark=mark)
        pipe.forward_backward(*share_of(make_batch(8, 2), (4, 4), pipe.replica), mark=mark)
        note_parameters(result, pipe.modules)
    return result


def test_a_gradient_of_one_replica_alone_counts_and_one_of_none_is_none() -> None:
    results = launch_on("threads", train_forked, 4)
    stages = [Forked(0), Forked(1)]
    trained = [p for stage in stages for p in stage.parameters() if p.requires_grad]
    optimizer = momentum(trained)
    for step in range(3):
        optimizer.zero_grad()
        x, y = make_batch(8, step)
        for part, sign in ((slice(0, 4), 1.0), (slice(4, 8), -1.0)):
            mark = torch.full((4,), sign)
            (squared_error(stages[1](stages[0](x[part], mark), mark), y[part]) / 2).backward()
        if step < 2:
            optimizer.step()
    plain = Result()
    note_parameters(plain, dict(enumerate(stages)))
    assert (0, "idle") not in plain.gradients
    compare(results, plain)
    assert_replicas_equal(results, 2)


def evaluate(context: RankContext, parts: Sequence[int]) -> tuple[Any, ...]:
    with pipeline(context, loss_fn=with_metrics, share_loss=True, optimizer=momentum) as pipe:
        x, y = share_of(make_batch(sum(parts), 0), parts, pipe.replica)
        loss = pipe.eval_step(x, y, num_microbatches=3)
        metrics = {name: value.item() for name, value in pipe.metrics.items()}
        output = pipe.predict(x, num_microbatches=1)
        pipe.train_step(x, y)
        return loss, metrics, {name: value.item() for name, value in pipe.metrics.items()}, output, x


def with_metrics(output: Tensor, target: Tensor) -> Any:
    """A metric beside the loss."""
    return squared_error(output, target), {"mean": output.mean().item()}


def test_evaluation_and_metrics_are_over_all_replicas_and_predictions_are_their_own() -> None:
    parts = (5, 8)
    model = nn.Sequential(make_stage(0), make_stage(1))
    x, y = make_batch(13, 0)
    expected = squared_error(model(x), y).item()
    mean = model(x).mean().item()
    outputs = 0
    for loss, evaluated, trained, output, own in launch_on("threads", evaluate, 4, (parts,)):
        assert loss.item() == pytest.approx(expected, rel=TOLERANCE)
        assert evaluated == pytest.approx({"mean": mean}, rel=TOLERANCE)
        assert trained == pytest.approx({"mean": mean}, rel=TOLERANCE)
        if output is not None:
            outputs += 1
            torch.testing.assert_close(output, model(own).detach(), rtol=TOLERANCE, atol=TOLERANCE)
    assert outputs == 2


class Dropping(nn.Module):
    """A block that drops."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.block = make_stage(stage)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.dropout(x))


def rows_of_eight(step: int) -> tuple[Tensor, Tensor]:
    """Divides by replicas and microbatches."""
    return make_batch(8, step)


def drop(context: RankContext, schedule: Schedule) -> Result:
    result = Result()
    with pipeline(
        context, build_stage=Dropping, schedule=schedule, optimizer=momentum, seed=SEED, share_loss=True
    ) as pipe:
        for step in range(2):
            loss = pipe.train_step(*share_of(rows_of_eight(step), (4, 4), pipe.replica))
            assert loss is not None
            result.losses.append(loss.item())
        pipe.forward_backward(*share_of(rows_of_eight(2), (4, 4), pipe.replica))
        note_parameters(result, pipe.modules)
    return result


@pytest.mark.parametrize("recompute", ["1f1b", "zb-h1"])
def test_dropout_is_that_of_one_pipeline_with_the_microbatches_of_all_replicas(recompute: str) -> None:
    results = launch_on("threads", drop, 4, (two_ranks(recompute),))
    compare(results, train_scenario(Scenario(Dropping, batch=rows_of_eight), 2, 4))
    assert_replicas_equal(results, 2)


class OtherEachTime(nn.Module):
    """A stage whose weights differ on every rank, though they should not."""

    def __init__(self, stage: int, rank: int) -> None:
        super().__init__()
        self.block = make_stage(stage)
        self.register_buffer("number", torch.tensor(rank))
        with torch.no_grad():
            self.block.widen.weight.add_(rank)
            self.block.widen.bias[0] = -0.0 if rank < 2 else 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class BuildForRank:
    """stage -> module, seeded carelessly."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, stage: int) -> nn.Module:
        return OtherEachTime(stage, self._rank)


def start(context: RankContext) -> dict[str, Tensor]:
    with pipeline(context, build_stage=BuildForRank(context.rank)) as pipe:
        (module,) = pipe.modules.values()
        return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_replicas_start_from_the_weights_and_buffers_of_the_first() -> None:
    of_ranks = launch_on("threads", start, 4)
    for rank, state in enumerate(of_ranks):
        expected = BuildForRank(rank - rank % 2)(rank // 2).state_dict()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert torch.signbit(state["block.widen.bias"][0]) == (rank < 2)


class ExplodesOnce:
    """stage -> module whose first stage can be told to overflow."""

    def __call__(self, stage: int) -> nn.Module:
        return Explosive(stage, 0)


def explode(context: RankContext, schedule: Schedule) -> tuple[Any, ...]:
    scales, skipped = [], []
    result = Result()
    with pipeline(
        context, build_stage=ExplodesOnce(), schedule=schedule, optimizer=momentum, loss_scale="dynamic"
    ) as pipe:
        for step in range(3):
            batch = share_of(make_batch(9, step), PARTS, pipe.replica)
            pipe.train_step(*batch, explode=step == 1 and pipe.replica == 1)
            scales.append(pipe.loss_scale)
            skipped.append(pipe.overflowed)
        note_parameters(result, pipe.modules)
    return scales, skipped, result


def test_an_overflow_in_one_replica_skips_the_update_in_all() -> None:
    of_ranks = launch_on("threads", explode, 4, (two_ranks(),))
    model = nn.Sequential(make_stage(0), make_stage(1))
    optimizer = momentum(model.parameters())
    for step in (0, 2):
        optimizer.zero_grad()
        x, y = make_batch(9, step)
        squared_error(model(x), y).backward()
        optimizer.step()
    for scales, skipped, result in of_ranks:
        assert scales == [65536.0, 32768.0, 32768.0]
        assert skipped == [False, True, False]
        for (stage, key), weight in result.weights.items():
            expected = model.get_parameter(f"{stage}.{key.removeprefix('block.')}").detach()
            torch.testing.assert_close(weight, expected, rtol=TOLERANCE, atol=TOLERANCE)


def half(stage: int) -> nn.Module:
    """A stage in low precision."""
    return make_stage(stage).to(torch.bfloat16)


def train_halves(context: RankContext, dp: int) -> tuple[Any, ...]:
    parts = [8 // dp] * dp
    masters: dict[str, Tensor] = {}
    with pipeline(
        context,
        dp,
        build_stage=half,
        schedule=two_ranks("1f1b", 4 // dp),
        optimizer=momentum,
        master_weights=True,
        max_norm=0.5,
    ) as pipe:
        for step in range(3):
            x, y = share_of(make_batch(8, step), parts, pipe.replica)
            pipe.train_step(x.bfloat16(), y.bfloat16())
        for name, master in pipe.named_parameters():
            assert master.dtype == torch.float32
            masters[name] = master.detach().clone()
        return masters, pipe.grad_norm


def test_masters_in_fp32_are_trained_alike() -> None:
    """The same microbatches, in one pipeline or two, so that only the order of sums differs."""
    alone = launch_on("threads", train_halves, 2, (1,))
    together = launch_on("threads", train_halves, 4, (2,))
    for rank, (masters, norm) in enumerate(together):
        expected, expected_norm = alone[rank // 2]
        assert norm == pytest.approx(expected_norm, rel=1e-5)
        for name, master in masters.items():
            torch.testing.assert_close(master, expected[name], rtol=1e-5, atol=1e-6)
            assert torch.equal(master, together[rank - rank % 2][0][name])


def train_norms(context: RankContext, dp: int, schedule: Schedule) -> dict[str, Tensor]:
    parts = [16 // dp] * dp
    with pipeline(
        context, dp, build_stage=Normed(0.1), schedule=schedule, optimizer=momentum, deferred_batch_norm=True
    ) as pipe:
        for step in range(2):
            pipe.train_step(*share_of(make_batch(16, step), parts, pipe.replica))
        return {
            f"{stage}.{name}": buffer.clone()
            for stage, module in pipe.modules.items()
            for name, buffer in module.named_buffers()
        }


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "2bw"])
def test_deferred_batch_norms_learn_of_the_rows_of_all_replicas(name: str) -> None:
    alone = launch_on("threads", train_norms, 2, (1, create(name, num_ranks=2, num_microbatches=8)))
    together = launch_on("threads", train_norms, 4, (2, create(name, num_ranks=2, num_microbatches=4)))
    for rank, buffers in enumerate(together):
        for key, buffer in alone[rank // 2].items():
            torch.testing.assert_close(buffers[key], buffer, rtol=1e-9, atol=1e-9)
            assert torch.equal(buffers[key], together[rank - rank % 2][key])


def fail_to_build(context: RankContext) -> None:
    pipeline(context, build_stage=Normed(0.1))


def test_batch_norms_that_would_drift_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="several copies.*deferred_batch_norm=True"):
        launch_on("threads", fail_to_build, 4)


def fail(context: RankContext) -> None:
    with pipeline(context, build_stage=Failing, optimizer=momentum) as pipe:
        pipe.train_step(*make_batch(4, 0), fail=context.rank == 3)


def test_a_rank_that_fails_ends_all_replicas_and_is_named() -> None:
    with pytest.raises(ArithmeticError) as caught:
        launch_on("threads", fail, 4)
    assert any("rank 1 of replica 1 failed at 1F0" in note for note in caught.value.__notes__)


@pytest.mark.slow
def test_every_process_of_every_replica_hears_of_a_failure() -> None:
    """Also those that wait for a sum, and whose own pipeline is whole."""
    *others, own = launch_local(fail_in_one_replica, 4)
    assert own == "ArithmeticError: no"
    for heard in others:
        assert heard.startswith("PeerError: ")
        assert "rank 1 of replica 1 failed at 1F0 (step 1): ArithmeticError: no" in heard


def train_without_targets(context: RankContext, parts: Sequence[int], give: str) -> tuple[Any, ...]:
    losses = []
    with pipeline(context, loss_fn=without_target, optimizer=momentum, share_loss=True) as pipe:
        for step in range(2):
            x, _ = share_of(make_batch(sum(parts), step), parts, pipe.replica)
            is_given = pipe.rank == 0 or give == "all" or (give == "some" and pipe.replica == 0)
            loss = pipe.train_step(x if is_given else None)
            assert loss is not None
            losses.append(loss.item())
    return tuple(losses)


def without_target(output: Tensor, target: None) -> Tensor:
    """A loss of the output alone."""
    return output.square().mean()


@pytest.mark.parametrize(("parts", "give"), [((6, 4), "all"), ((4, 4), "none")])
def test_without_targets_replicas_count_by_the_rows_of_their_inputs_or_alike(parts: Any, give: str) -> None:
    model = nn.Sequential(make_stage(0), make_stage(1))
    optimizer = momentum(model.parameters())
    expected = []
    for step in range(2):
        optimizer.zero_grad()
        loss = without_target(model(make_batch(sum(parts), step)[0]), None)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in launch_on("threads", train_without_targets, 4, (parts, give)):
        assert losses == pytest.approx(expected, rel=TOLERANCE)


def test_replicas_of_which_only_some_know_their_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 replicas do not know theirs"):
        launch_on("threads", train_without_targets, 4, ((4, 4), "some"))
