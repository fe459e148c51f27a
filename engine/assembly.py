"""Assembly: everything that one rank has of a pipeline, put together from what the user asks for."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import nn

from stagewright.engine.copies import CopiesAlike
from stagewright.engine.locals import local_of
from stagewright.engine.plan import OnNan, Recompute, kept_microbatches, splits_backward
from stagewright.engine.sharded import ShardedStage, check_sharded, is_reduced_by_itself, sharded_modules
from stagewright.engine.stages.batchnorm import DeferredBatchNorms, check_norms
from stagewright.engine.stages.randomness import Seeds
from stagewright.engine.stages.stage import Stage
from stagewright.engine.staleness import Remedies, Remedy
from stagewright.engine.transport.contract import Transport
from stagewright.engine.transport.group import Group, share
from stagewright.engine.updates.agreement import Agreement, LossScale
from stagewright.engine.updates.extrapolated import ExtrapolatedWeights
from stagewright.engine.updates.gradients import Gradients
from stagewright.engine.updates.optimizers import OptimizerFactory
from stagewright.engine.updates.reduction import Reduction
from stagewright.engine.updates.replicas import Replicas, share_values
from stagewright.engine.updates.sharing import settle_sharing
from stagewright.engine.updates.ties import Ties
from stagewright.engine.updates.updater import Updater
from stagewright.engine.updates.versions import VersionedWeights
from stagewright.engine.updates.weights import SingleWeights, StageWeights
from stagewright.schedules import Program

BuildStage: TypeAlias = Callable[[int], nn.Module] | Mapping[int, nn.Module]


@dataclass(frozen=True)
class Options:
    """How a rank computes and updates; ``Pipeline`` says what each means.

    Raises:
        ValueError: one of them cannot be.
    """

    optimizer: OptimizerFactory | None = None
    seed: int = 0
    recompute: Recompute | Mapping[int, Recompute] = "off"
    tied: Sequence[Sequence[str]] = ()
    max_norm: float | None = None
    autocast: torch.dtype | None = None
    master_weights: bool = False
    loss_scale: float | Literal["dynamic"] | None = None
    loss_counts: bool = False
    deferred_batch_norm: bool = False
    staleness: Remedy | Sequence[Remedy] = ()
    on_nan: OnNan | None = None

    def __post_init__(self) -> None:
        if self.on_nan not in (None, "raise", "skip"):
            raise ValueError(f'on_nan is "raise", "skip" or None: got {self.on_nan!r}')
        if self.max_norm is not None and not self.max_norm >= 0:
            raise ValueError(f"max_norm is a number of 0 or more: got {self.max_norm}")
        if self.autocast not in (None, torch.float16, torch.bfloat16):
            raise ValueError(f"autocast is torch.bfloat16, torch.float16 or None: got {self.autocast!r}")

    @property
    def scalars(self) -> bool:
        """Whether an update is known to need values of all ranks."""
        return self.loss_counts or any(option is not None for option in (self.max_norm, self.loss_scale, self.on_nan))


@dataclass(frozen=True)
class Assembly:
    """The parts of one rank.

    Args:
        transport: connects it to the others.
        group: the same rank of all replicas of the pipeline.
        stages, weights: by stage.
        ties, gradients, agreement, updater: lead from gradients to new weights.
        seeds: of all its forwards.
        norms: whose running statistics are those of whole batches.
        sharded: those stages of this rank whose parameters are gathered and freed.
        sharded_stages: such stages on any rank.
    """

    transport: Transport
    group: Group
    stages: Mapping[int, Stage]
    weights: Mapping[int, StageWeights]
    ties: Ties
    gradients: Gradients
    agreement: Agreement
    updater: Updater
    seeds: Seeds
    norms: DeferredBatchNorms
    sharded: Mapping[int, ShardedStage]
    sharded_stages: frozenset[int]


def assemble(
    build_stage: BuildStage, program: Program, transport: Transport, group: Group, options: Options
) -> Assembly:
    """Build this rank's stages and all that trains them; replicas of a pipeline start from the weights of the first.

    Raises:
        ValueError: options contradict each other, or do not fit the stages; or copies of a stage differ.
        TypeError: a stage is no module.
    """
    placement, rank = program.placement, transport.rank
    modules = _modules(build_stage, program, transport, group, options)
    sharded = {stage: ShardedStage(module) for stage, module in modules.items() if sharded_modules(module)}
    num_versions = program.updates.num_versions[rank] if program.updates.max_staleness else 1
    remedies = Remedies(options.staleness, program.updates, rank)
    weights = {stage: _weights(module, num_versions, options, remedies) for stage, module in modules.items()}
    seeds = Seeds(options.seed, transport.device, group.rank * program.num_microbatches)
    stages = _stages(modules, weights, seeds, splits_backward(program), options)
    trained = {stage: of_stage.trained for stage, of_stage in weights.items()}
    if options.loss_scale is not None:
        _check_unscaling(trained)
    ties = Ties(options.tied, modules, trained, placement, transport)
    for of_stage in weights.values():
        of_stage.publish()  # tied weights have taken the first stage's value
    agreement = Agreement(transport, group)
    norms = DeferredBatchNorms(modules if options.deferred_batch_norm else {}, placement, agreement, group)
    parameters = {stage: of_stage.values() for stage, of_stage in trained.items()}
    reduction = Reduction(parameters, group, sharded) if group.size > 1 else None
    gradients = Gradients(weights, reduction, Replicas(placement, trained, transport), ties, placement, rank)
    updater = Updater(
        options.optimizer,
        weights,
        gradients,
        agreement,
        remedies,
        max_norm=options.max_norm,
        loss_scale=LossScale.of(options.loss_scale),
        on_nan=options.on_nan,
    )
    return Assembly(
        transport,
        group,
        stages,
        weights,
        ties,
        gradients,
        agreement,
        updater,
        seeds,
        norms,
        sharded,
        _all_sharded(sharded, transport, group),
    )


def _modules(
    build_stage: BuildStage, program: Program, transport: Transport, group: Group, options: Options
) -> dict[int, nn.Module]:
    """The modules of this rank's stages; all copies of a stage are alike, and have the values of the first."""
    placement = program.placement
    with transport.baton:  # a stage that seeds before it draws its weights must not be disturbed
        modules = {
            stage: _module(build_stage, stage, transport.device) for stage in placement.stages_of(transport.rank)
        }
    with CopiesAlike(placement, transport, group) as copies:
        settle_sharing(modules, options.tied)
        check_norms(modules, placement, group.size, deferred=options.deferred_batch_norm)
        copies.answer(modules)
    share_values(placement, modules, transport)
    for module in modules.values():
        _share_values(module, group)
    check_sharded(
        modules,
        placement,
        group,
        has_versions=program.updates.max_staleness > 0,
        tied=options.tied,
        has_masters=options.master_weights,
    )
    return modules


def _stages(
    modules: Mapping[int, nn.Module],
    weights: Mapping[int, StageWeights],
    seeds: Seeds,
    splits: bool,
    options: Options,
) -> dict[int, Stage]:
    return {
        stage: Stage(
            stage,
            module,
            seeds,
            weights=weights[stage],
            splits_backward=splits,
            num_kept=kept_microbatches(options.recompute, stage),
            autocast=options.autocast,
        )
        for stage, module in modules.items()
    }


def _share_values(module: nn.Module, group: Group) -> None:
    """Let a stage start from the values that it has in the first replica; shards are their owners' affair."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not is_reduced_by_itself(tensor):
            share(group, local_of(tensor))


def _all_sharded(sharded: Collection[int], transport: Transport, group: Group) -> frozenset[int]:
    """The sharded stages of all ranks; there are none without replicas."""
    if group.size == 1:
        return frozenset()
    return frozenset(
        int(stage) for data in transport.gather(json.dumps([*sharded]).encode()) for stage in json.loads(data)
    )


def _weights(module: nn.Module, num_versions: int, options: Options, remedies: Remedies) -> StageWeights:
    if num_versions == 1:
        return SingleWeights(module, master=options.master_weights)
    if remedies.extrapolation is not None:
        return ExtrapolatedWeights(module, num_versions, remedies.extrapolation, master=options.master_weights)
    return VersionedWeights(module, num_versions, master=options.master_weights)


def _check_unscaling(trained: Mapping[int, Mapping[str, nn.Parameter]]) -> None:
    """Refuse gradients that would vanish when they are divided by the loss scale."""
    for stage, parameters in trained.items():
        for name, parameter in parameters.items():
            if parameter.dtype == torch.float16:
                raise ValueError(
                    f"{name} of stage {stage} is float16: a gradient of that type cannot be divided by the loss scale "
                    "without loss; give master_weights=True, or keep the weights in float32 and give autocast"
                )


def _module(build_stage: BuildStage, stage: int, device: torch.device) -> nn.Module:
    if isinstance(build_stage, Mapping):
        if stage not in build_stage:
            raise ValueError(f"this rank owns stage {stage}: the dict of modules has only {sorted(build_stage)}")
        module = build_stage[stage]
    else:
        module = build_stage(stage)
    if not isinstance(module, nn.Module):
        raise TypeError(f"a stage is an nn.Module: build_stage gave {type(module).__name__} for stage {stage}")
    return module.to(device)
