"""Names: what parameters are called in the whole model, and the parts of a training that go by them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import Shape, make_pipeline, make_tokens
from launching import launch_on
from torch import Tensor, nn

from stagewright.engine import (
    Checkpoints,
    ErrorFeedback,
    Pipeline,
    RankContext,
    WeightPrediction,
    read_part,
    read_state_dict,
)
from stagewright.engine.checkpoint.names import Names
from stagewright.models import GPTConfig, build_gpt, cut_sequential
from stagewright.models.chain import ChainStage


def layer(number: int) -> nn.Linear:
    module = nn.Linear(3, 3, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.eye(3) * (number + 1) / 8)
        module.bias.fill_(number)
    return module


def build(num_stages: int) -> Callable[[int], nn.Module]:
    """Four layers, in stages that know nothing of each other."""
    each = 4 // num_stages
    return lambda stage: nn.Sequential(*(layer(stage * each + number) for number in range(each)))


def by_layer(num_stages: int) -> Callable[[int, str], str]:
    """How a user tells what layer a member of a stage's Sequential is."""
    each = 4 // num_stages

    def name_of(stage: int, name: str) -> str:
        member, _, rest = name.partition(".")
        return f"layers.{stage * each + int(member)}.{rest}"

    return name_of


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def mine(context: RankContext, num_stages: int, folder: Path, steps: int, named: bool) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    with Pipeline(
        build(num_stages),
        schedule="1f1b",
        num_microbatches=2,
        loss_fn=squares,
        optimizer=lambda pairs: torch.optim.Adam(pairs, lr=0.1),
        transport=context.transport,
        share_loss=True,
    ) as pipe:
        names = by_layer(num_stages) if named else None
        checkpoints = Checkpoints(folder, pipe, global_name=names)
        checkpoints.load()
        losses = [float(pipe.train_step(x, -x)) for _ in range(steps)]  # type: ignore[arg-type]
        checkpoints.save()
        return losses


def test_stages_of_any_kind_go_by_names_that_a_function_gives(tmp_path: Path) -> None:
    [alone] = launch_on("threads", mine, 1, (1, tmp_path / "alone", 6, True))
    losses: list[float] = []
    for num_stages in (4, 2, 1):
        losses += launch_on("threads", mine, num_stages, (num_stages, tmp_path / "on", 2, True))[0]
    assert losses == pytest.approx(alone, rel=1e-12)
    known = {f"layers.{number}.{kind}" for number in range(4) for kind in ("weight", "bias")}
    assert read_state_dict(tmp_path / "on").keys() == known


def test_without_a_function_names_have_the_stage_in_front_and_belong_to_its_cut(tmp_path: Path) -> None:
    first, second = (launch_on("threads", mine, 2, (2, tmp_path, 2, False))[0] for _ in range(2))
    [alone] = launch_on("threads", mine, 1, (1, tmp_path / "alone", 4, False))
    assert first + second == pytest.approx(alone, rel=1e-12)
    assert sorted(read_state_dict(tmp_path))[:2] == ["stage0.0.bias", "stage0.0.weight"]
    with pytest.raises(ValueError, match=r"cut elsewhere: it has no stage[0-3]\..*, but stage0\.0\.bias.* and 5 more"):
        launch_on("threads", mine, 4, (4, tmp_path, 2, False))


def test_models_of_ours_name_their_parameters_themselves() -> None:
    shape = {"num_layers": 2, "hidden_size": 4, "num_heads": 2}
    gpt = build_gpt(GPTConfig(**shape))
    assert Names({1: gpt}).of(1, "layers.1.mlp.widen.weight") == "layers.1.mlp.widen.weight"
    chain = cut_sequential(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    stage = chain.build(range(1, 2))
    assert isinstance(stage, ChainStage)
    assert Names({1: stage}).of(1, "1.weight") == "1.weight"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # of torch's own, when it compiles
def test_names_are_those_of_before_compiling() -> None:
    part = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2)))
    assert Names({3: part}).of(3, "1._orig_mod.weight") == "stage3.1.weight"
    assert Names({0: torch.compile(part)}).of(0, "_orig_mod.1._orig_mod.weight") == "stage0.1.weight"  # type: ignore[dict-item]


def test_two_parameters_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.weight of stage 0 and 1\.weight of stage 0 would both be called"):
        Names({0: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))}, lambda stage, name: name.rpartition(".")[2])


def test_a_weight_with_several_names_has_them_all() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    assert Names({0: module}, lambda stage, name: name).aliases(0) == {"1.weight": "0.weight"}


class Scheduled:
    """A training with two kinds of schedulers, one of them made of others."""

    def __init__(self, context: RankContext, shape: Shape) -> None:
        self.pipe = make_pipeline(context, shape)
        assert self.pipe.optimizer is not None
        schedulers = [
            torch.optim.lr_scheduler.LinearLR(self.pipe.optimizer, total_iters=3),
            torch.optim.lr_scheduler.LambdaLR(self.pipe.optimizer, lambda step: 0.9**step),
        ]
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.pipe.optimizer, schedulers, milestones=[3])
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.pipe.optimizer, patience=0)

    def train(self, start: int, stop: int) -> list[tuple[float, list[float]]]:
        """(loss, learning rates of what each rank has) of each step."""
        assert self.pipe.optimizer is not None
        result = []
        for step in range(start, stop):
            loss = self.pipe.train_step(*make_tokens(step))
            assert loss is not None
            result.append((loss.item(), sorted({group["lr"] for group in self.pipe.optimizer.param_groups})[-2:]))
            self.scheduler.step()
            self.plateau.step(loss.item())
        return result


def schedule_rates(context: RankContext, shape: Shape, folder: Path, start: int, stop: int) -> Any:
    training = Scheduled(context, shape)
    has_both = context.rank > 0 or context.num_ranks < 4
    parts = {"scheduler": training.scheduler, "plateau": training.plateau if has_both else None}
    with training.pipe as pipe:
        checkpoints = Checkpoints(folder, pipe, parts=parts)  # type: ignore[arg-type]
        assert checkpoints.load() == (start or None)
        result = training.train(start, stop)
        checkpoints.save()
        return result


@pytest.mark.filterwarnings("ignore:The epoch parameter in")
def test_schedulers_go_on_on_other_ranks(tmp_path: Path) -> None:
    """One of several, whose lists are as long as the rank's parameter groups, and one that rank 0 has not saved."""
    [alone] = launch_on("threads", schedule_rates, 1, (Shape("gpipe", 1), tmp_path / "alone", 0, 6))
    first = launch_on("threads", schedule_rates, 4, (Shape("1f1b", 4), tmp_path / "on", 0, 2))
    second = launch_on("threads", schedule_rates, 2, (Shape("1f1b", 2), tmp_path / "on", 2, 4))
    third = launch_on("threads", schedule_rates, 1, (Shape("1f1b", 1), tmp_path / "on", 4, 6))
    for (loss, rates), (loss_alone, rates_alone) in zip(first[3] + second[1] + third[0], alone):
        assert loss == pytest.approx(loss_alone, rel=1e-11)
        assert rates == pytest.approx(rates_alone, rel=1e-12)
    assert len({rates[0] for _, rates in alone}) > 3
    state = read_part(tmp_path / "on", "plateau")
    assert state is not None
    assert state["best"] == pytest.approx(min(loss for loss, _ in alone), rel=1e-11)


def draw(context: RankContext, folder: Path) -> Any:
    """What torch and Python draw after a checkpoint, and after going on from it."""
    with make_pipeline(context, Shape("1f1b", 1)) as pipe:
        checkpoints = Checkpoints(folder, pipe)
        torch.manual_seed(5)
        random.seed(6)
        checkpoints.save()
        drawn = torch.rand(3).tolist(), random.random()
        torch.manual_seed(7)
        random.seed(8)
        checkpoints.load()
        return drawn, (torch.rand(3).tolist(), random.random())


def test_random_generators_go_on(tmp_path: Path) -> None:
    [(drawn, again)] = launch_on("threads", draw, 1, (tmp_path,))
    assert drawn == again


@pytest.mark.parametrize("remedy", [ErrorFeedback(), WeightPrediction()], ids=["feedback", "prediction"])
def test_remedies_against_staleness_go_on(remedy: Any, tmp_path: Path) -> None:
    """To the last bit; without what they remember the curve would be another."""
    shape = Shape("2bw", 2, pipeline={"staleness": remedy})
    [unbroken, _] = launch_on("threads", treated, 2, (shape, tmp_path / "unbroken", 0, 6))
    [first, _] = launch_on("threads", treated, 2, (shape, tmp_path / "broken", 0, 3))
    [second, _] = launch_on("threads", treated, 2, (shape, tmp_path / "broken", 3, 6))
    assert first + second == unbroken


def treated(context: RankContext, shape: Shape, folder: Path, start: int, stop: int) -> list[float]:
    with make_pipeline(context, shape) as pipe:
        checkpoints = Checkpoints(folder, pipe)
        assert checkpoints.load() == (start or None)
        losses = [float(pipe.train_step(*make_tokens(step))) for step in range(start, stop)]  # type: ignore[arg-type]
        checkpoints.save()
        return losses
