"""The measure of updates by old gradients: a plain loop that keeps every version of the weights there ever was."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from plain import make_stage, momentum, squared_error
from torch import Tensor
from torch.func import functional_call

from stagewright.engine import Pipeline, RankContext
from stagewright.schedules import Schedule

# By (stage, name).
Weights: TypeAlias = Mapping[tuple[int, str], Tensor]


@dataclass
class Rule:
    """Which weights an update's gradients are computed with, and what is done about it.

    Args:
        version: (stage, update) -> the version that its gradient is computed with; update u makes version u + 1.
        prediction, movement: add to a version so many times its last change, without what weight decay did; or so many
            times the mean of its changes, with this share of it kept at each.
        discount: (delay, update) -> factor of the learning rate.
        feedback: add the part of (change - last change), where the last one was late.
    """

    version: Callable[[int, int], int]
    prediction: Mapping[int, float] = field(default_factory=dict)
    movement: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    discount: Callable[[int, int], float] = lambda delay, update: 1.0
    feedback: float = 0.0


def train_stale(
    num_stages: int,
    batches: Sequence[tuple[Tensor, Tensor]],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    rule: Rule,
    decay: float = 0.0,
) -> tuple[list[float], Weights]:
    """One update a batch; returns the losses and the newest weights.

    Args:
        num_stages, batches, optimizer: what is trained, on what and how; each stage has an optimizer of its own.
        rule: of staleness.
        decay: by what part an update shrinks weights, beside what it makes of gradients.
    """
    stages = {stage: make_stage(stage) for stage in range(num_stages)}
    steps = {stage: optimizer(list(module.named_parameters())) for stage, module in stages.items()}
    named = [(stage, name, weight) for stage, module in stages.items() for name, weight in module.named_parameters()]
    weights = {(stage, name): weight.detach().clone() for stage, name, weight in named}
    mean = {key: torch.zeros_like(weight) for key, weight in weights.items()}
    last: dict[tuple[int, str], Tensor] = {}
    computed = [weights]
    losses: list[float] = []
    for update, (x, y) in enumerate(batches):
        delays = {stage: update - rule.version(stage, update) for stage in stages}
        leaves = {key: computed[update - delays[key[0]]][key].clone().requires_grad_() for key in weights}
        for stage, module in stages.items():
            x = functional_call(module, {name: leaf for (owner, name), leaf in leaves.items() if owner == stage}, (x,))
        loss = squared_error(x, y)
        losses.append(loss.item())
        for (stage, name), gradient in zip(leaves, torch.autograd.grad(loss, list(leaves.values()))):
            stages[stage].get_parameter(name).grad = gradient
        for stage in stages:
            (group,) = steps[stage].param_groups
            rate = group["lr"]
            group["lr"] = rate * rule.discount(delays[stage], update)
            steps[stage].step()
            group["lr"] = rate
        made, moved = {}, {}
        for key, before in weights.items():
            stage, name = key
            parameter = stages[stage].get_parameter(name)
            change = parameter.detach() - before
            if rule.feedback and delays[stage] and key in last:
                with torch.no_grad():
                    parameter += rule.feedback * (change - last[key])
            last[key] = change
            if not delays[stage]:
                del last[key]
            made[key] = parameter.detach().clone()
            moved[key] = made[key] + rule.prediction.get(stage, 0.0) * (made[key] - (1 - decay) * before)
            times, kept = rule.movement.get(stage, (0.0, 0.0))
            mean[key] = kept * mean[key] + (1 - kept) * (made[key] - before)
            moved[key] = moved[key] + times * mean[key]
        weights = made
        computed.append(moved)
    return losses, weights


def train_rank(
    context: RankContext, schedule: Schedule, flushed: Sequence[int], options: Mapping[str, Any]
) -> tuple[list[float], Weights, float | None]:
    """One rank of a pipeline: the losses, the newest weights, and the last norm.

    Args:
        context, schedule: of the rank.
        flushed: batches after which the pipeline is drained.
        options: of the pipeline; and ``batches``.
    """
    torch.set_num_threads(1)
    options = {"build_stage": make_stage, "loss_fn": squared_error, "optimizer": momentum, **options}
    batches = options.pop("batches")
    with Pipeline(schedule=schedule, transport=context.transport, share_loss=True, **options) as pipe:
        losses = []
        for step, batch in enumerate(batches):
            loss = pipe.train_step(*batch)
            assert loss is not None
            losses.append(loss.item())
            if step in flushed:
                pipe.flush()
        state = pipe.state_dict()["stages"]
        weights = {(stage, name): weight.clone() for stage, of in state.items() for name, weight in of.items()}
        return losses, weights, pipe.grad_norm
