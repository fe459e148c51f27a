"""The measure of asynchronous training: a plain loop in one process that trains by the delayed rule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import pytest
import torch
from plain import make_batch, make_stage, squared_error
from tied import TIED, Build, make_text, mean_over_tokens, sum_and_count
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext
from stagewright.engine.stages.randomness import seed_of

Action: TypeAlias = Literal["flush", "evaluate", "predict", "save"]

SEED: Final = 3
TOLERANCE: Final = 1e-11
OPTIMIZERS: Final[Mapping[str, Callable[[Any], torch.optim.Optimizer]]] = MappingProxyType(
    {
        "sgd": lambda named: torch.optim.SGD(named, lr=0.01),
        "momentum": lambda named: torch.optim.SGD(named, lr=0.002, momentum=0.9, weight_decay=0.1),
        "adam": lambda named: torch.optim.Adam(named, lr=0.01),
        "adamw": lambda named: torch.optim.AdamW(named, lr=0.01, weight_decay=0.1),
    }
)


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        num_ranks, num_microbatches: the shape; a stage a rank.
        schedule, options: of the schedule.
        num_batches: so many updates under 2BW.
        optimizer: by name.
        decays: a scheduler lowers the learning rate with every batch.
        max_norm: to which gradients are clipped.
        model: ``blocks``; ``dropout``: blocks that drop, seeded as the engine says; or ``tied``: a language model whose
            embedding is its head, under a loss that comes as (sum, count).
        recompute: as the pipeline takes it.
        actions: what is done after which batch.
        rows: of every batch; where left out, they do not divide by the microbatches, and change.
        per_update: microbatches that make an update of PipeDream.
        delays: updates that PipeDream's gradients lag behind on each stage; where left out, as many as ranks follow.
    """

    num_ranks: int
    num_microbatches: int
    schedule: str = "2bw"
    options: Mapping[str, Any] = field(default_factory=dict)
    num_batches: int = 10
    optimizer: str = "momentum"
    decays: bool = False
    max_norm: float | None = None
    model: Literal["blocks", "dropout", "tied"] = "blocks"
    recompute: Any = "off"
    actions: Mapping[int, Action] = field(default_factory=dict)
    rows: int | None = None
    per_update: int = 1
    delays: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        """One a rank, or one for each number of replicas."""
        return len(self.options.get("replicas", range(self.num_ranks)))

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """One a step."""
        changing = [2 * self.num_microbatches + 1 + step % 3 for step in range(self.num_batches)]
        return [self._batch(self.rows or rows, step) for step, rows in enumerate(changing)]

    @property
    def other_batch(self) -> tuple[Tensor, Tensor]:
        """What is evaluated."""
        return self._batch(self.num_microbatches + 2, 77)

    def _batch(self, rows: int, step: int) -> tuple[Tensor, Tensor]:
        return (make_text if self.model == "tied" else make_batch)(rows, step)

    def build(self, *, tie: bool = False) -> Callable[[int], nn.Module]:
        """Stage -> module."""
        if self.model == "tied":
            return Build(self.num_stages, tie=tie)
        return Dropping if self.model == "dropout" else make_stage


class Dropping(nn.Module):
    """A block that drops some of its input and of its output."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.block = make_stage(stage)
        self.first, self.last = nn.Dropout(0.2), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.block(self.first(x)))
        return y


def label(case: Case) -> str:
    """A case as the name of a test."""
    extras = [
        case.optimizer,
        "" if case.model == "blocks" else case.model,
        "decays" if case.decays else "",
        "clips" if case.max_norm is not None else "",
        "recomputes" if case.recompute != "off" else "",
        *("+".join(map(str, case.options)),),
        " ".join(f"{action}@{batch}" for batch, action in case.actions.items()),
    ]
    return "-".join([f"P{case.num_ranks}-M{case.num_microbatches}", *filter(None, extras)])


@dataclass
class Trained:
    """What a training leaves: losses of the batches, norms, weights by (stage, name), and what was evaluated."""

    losses: list[float | None] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    weights: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    evaluated: list[float | None] = field(default_factory=list)


class Versions:
    """All weights there ever were, stage by stage; a module has those of one version at a time."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._parameters = [list(module.parameters()) for module in modules]
        self._kept = [[self._copy(stage)] for stage in range(len(modules))]

    @torch.no_grad()
    def use(self, stage: int, version: int) -> None:
        """Put the weights of a version in place."""
        for parameter, value in zip(self._parameters[stage], self._kept[stage][version]):
            parameter.copy_(value)

    def keep(self) -> None:
        """What is in place now is the next version of every stage."""
        for stage, versions in enumerate(self._kept):
            versions.append(self._copy(stage))

    def use_newest(self) -> None:
        """Put the newest weights of all stages in place."""
        for stage in range(len(self._kept)):
            self.use(stage, -1)

    def _copy(self, stage: int) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters[stage]]


def train_delayed(case: Case) -> Trained:
    """The plain loop: forward and backward of a microbatch on old weights, updates from the newest ones.

    Batch t of 2BW runs on version max(t - 1, 0), and that of a synchronous schedule on the newest. What goes into
    update k of PipeDream runs on version max(k - d, first), where ``first`` updates were made at the last drain, and d
    is P-1-r on rank r, or P-1 with vertical sync.
    """
    build = case.build(tie=True)
    modules = [build(stage) for stage in range(case.num_stages)]
    model = nn.Sequential(*modules)
    optimizer = OPTIMIZERS[case.optimizer](list(model.named_parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    versions = Versions(modules)
    result = Trained()
    made = drained = 0
    for step, (x, y) in enumerate(case.batches):
        count = case.num_microbatches
        parts = list(zip(x.tensor_split(count), y.tensor_split(count)))
        total = 0.0
        per_update = case.per_update if case.schedule == "pipedream" else count
        for microbatch, (inputs, targets) in enumerate(parts):
            for stage in range(case.num_stages):
                versions.use(stage, version_of(case, stage, step, made, drained))
            share = share_of(case, targets, y)
            loss = forward(case, modules, inputs, targets, step, microbatch)
            total += loss.item() * share
            first = microbatch - microbatch % per_update
            rows = sum(len(part) for _, part in parts[first : first + per_update])
            (loss * (share if per_update == count else len(targets) / rows)).backward()
            if (microbatch + 1) % per_update == 0:
                versions.use_newest()
                if case.max_norm is not None:
                    result.norms.append(nn.utils.clip_grad_norm_(model.parameters(), case.max_norm).item())
                optimizer.step()
                optimizer.zero_grad()
                versions.keep()
                made += 1
        result.losses.append(total)
        if case.decays:
            scheduler.step()
        if step in case.actions:
            drained = made
            versions.use_newest()
            if case.actions[step] in ("evaluate", "predict"):
                result.evaluated.append(evaluate(case, model))
    versions.use_newest()
    result.weights = weights_of(modules)
    return result


def version_of(case: Case, stage: int, step: int, made: int, drained: int) -> int:
    """The weights that a stage computes with next."""
    if case.schedule == "2bw":
        return max(step - 1, 0)
    if case.schedule == "1f1b":
        return made
    if case.delays:
        return max(made - case.delays[stage], drained)
    rank = 0 if case.options.get("vertical_sync") else stage
    return max(made - (case.num_ranks - 1 - rank), drained)


def forward(
    case: Case, modules: Sequence[nn.Module], value: Tensor, target: Tensor, step: int, microbatch: int
) -> Tensor:
    """The mean loss of a microbatch."""
    for stage, module in enumerate(modules):
        torch.manual_seed(seed_of(SEED, step, microbatch, stage))
        value = module(value)
    if case.model == "tied":
        total, count = sum_and_count(value, target)
        loss: Tensor = total / count.clamp(min=1)
        return loss
    return squared_error(value, target)


def share_of(case: Case, part: Tensor, whole: Tensor) -> float:
    """Which part of a batch's mean a microbatch's mean is: by tokens that count, or by rows."""
    if case.model == "tied":
        return float((part >= 0).sum() / (whole >= 0).sum().double())
    return len(part) / len(whole)


def evaluate(case: Case, model: nn.Module) -> float:
    """The loss in evaluation mode."""
    model.eval()
    x, y = case.other_batch
    with torch.no_grad():
        loss = (mean_over_tokens if case.model == "tied" else squared_error)(model(x), y)
    model.train()
    return float(loss)


def weights_of(modules: Sequence[nn.Module]) -> dict[tuple[int, str], Tensor]:
    """By (stage, name)."""
    return {
        (stage, name): weight.detach().clone()
        for stage, module in enumerate(modules)
        for name, weight in module.named_parameters(remove_duplicate=False)
    }


def make_pipeline(context: RankContext, case: Case, **options: Any) -> Pipeline:
    """One rank of the pipeline that a case describes."""
    tied = {"tied": TIED, "loss_fn": sum_and_count, "loss_counts": True}
    options = {
        "loss_fn": squared_error,
        "dynamic_shapes": case.rows is None,
        **(tied if case.model == "tied" else {}),
        **case.options,
        "share_loss": True,
        **options,
    }
    return Pipeline(
        case.build(),
        schedule=case.schedule,
        num_microbatches=case.num_microbatches,
        optimizer=OPTIMIZERS[case.optimizer],
        transport=context.transport,
        seed=SEED,
        recompute=case.recompute,
        max_norm=case.max_norm,
        **options,
    )


def train_rank(context: RankContext, case: Case) -> Trained:
    """One rank's share of the same training."""
    torch.set_num_threads(1)
    result = Trained()
    with make_pipeline(context, case) as pipe:
        scheduler = None
        if pipe.optimizer is not None and case.decays:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.9)
        for step, batch in enumerate(case.batches):
            loss = pipe.train_step(*batch)
            result.losses.append(None if loss is None else loss.item())
            if scheduler is not None:
                scheduler.step()
            if step in case.actions:
                act(pipe, case, case.actions[step], result)
        result.weights = newest_of(pipe)
        result.norms.append(pipe.grad_norm)
        assert_drained(pipe)
    return result


def train_many(context: RankContext, cases: Sequence[Case]) -> list[Trained]:
    """Several trainings one after the other: starting processes takes long."""
    return [train_rank(context, case) for case in cases]


def act(pipe: Pipeline, case: Case, action: Action, result: Trained) -> None:
    """What a trainer may do between any two batches; all of it drains the pipeline."""
    x, y = case.other_batch
    match action:
        case "flush":
            pipe.flush()
        case "save":
            pipe.state_dict()
        case "evaluate":
            loss = pipe.eval_step(x, y, num_microbatches=2)
            assert loss is not None
            result.evaluated.append(loss.item())
        case "predict":
            output = pipe.predict(x, num_microbatches=3)
            loss_of = mean_over_tokens if case.model == "tied" else squared_error
            result.evaluated.append(None if output is None else loss_of(output, y).item())
    assert_drained(pipe)


def newest_of(pipe: Pipeline) -> dict[tuple[int, str], Tensor]:
    """The weights that a checkpoint has."""
    return {
        (stage, name): weight.clone()
        for stage, of_stage in pipe.state_dict()["stages"].items()
        for name, weight in of_stage.items()
    }


def assert_drained(pipe: Pipeline) -> None:
    """Nothing is in flight: no stash, no letter, no gradient."""
    training: Any = pipe._training
    assert not hasattr(training, "_mail") or training._mail.is_empty
    for index, stage in pipe._stages.items():
        assert not stage.stash
        weights: Any = pipe._assembly.weights[index]
        assert not getattr(weights, "_gradients", {})
        assert all(parameter.grad is None for parameter in weights.trained.values())
        assert all(parameter.grad is None for parameter in stage.module.parameters())


def assert_same(results: Sequence[Trained], plain: Trained) -> None:
    """Losses, weights, the last norm and what was evaluated are those of the plain loop."""
    found: set[tuple[int, str]] = set()
    for result in results:
        if result.losses != [None] * len(plain.losses):
            assert result.losses == pytest.approx(plain.losses, rel=TOLERANCE, abs=TOLERANCE)
        if plain.norms:
            assert result.norms == pytest.approx(plain.norms[-1:], rel=TOLERANCE)
        for ours, theirs in zip(result.evaluated, plain.evaluated, strict=True):
            assert ours is None or ours == pytest.approx(theirs, rel=TOLERANCE)
        for key, weight in result.weights.items():
            torch.testing.assert_close(weight, plain.weights[key], rtol=TOLERANCE, atol=TOLERANCE, msg=str(key))
        found |= set(result.weights)
    assert found == set(plain.weights)
    assert any(None not in result.losses for result in results)
    assert any(None not in result.evaluated for result in results)
