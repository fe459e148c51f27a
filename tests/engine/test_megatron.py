"""A training loop in Megatron-LM's manner gives, on every schedule, the losses and gradients of a plain loop."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_toy import SHAPE, Toy, config, forward_step, iterator_for, mean, mean_of_masked, microbatch_of
from plain import TOLERANCE
from shapes import label, schedules_of, synchronous_names
from torch import Tensor, nn

from stagewright.engine import RankContext, launch_local
from stagewright.engine.megatron import get_forward_backward_func
from stagewright.engine.megatron.forward_backward import ForwardBackward
from stagewright.schedules import Schedule, create, names

STEPS = 2
README = Path(__file__).parents[2] / "README.md"


class Outcome:
    """What a training leaves: metrics of the steps, gradients by (stage, name), weights."""

    def __init__(self) -> None:
        self.metrics: list[list[Any]] = []
        self.gradients: dict[tuple[int, str], Tensor] = {}
        self.weights: dict[tuple[int, str], Tensor] = {}

    def note(self, stage: int, chunk: nn.Module) -> None:
        for name, parameter in chunk.named_parameters():
            assert parameter.grad is not None
            self.gradients[stage, name] = parameter.grad.clone()
            self.weights[stage, name] = parameter.detach().clone()


def make_optimizer(chunks: list[Toy]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for chunk in chunks for parameter in chunk.parameters()], lr=0.1, momentum=0.9)


@cache
def plain(num_stages: int, num_microbatches: int, loss_func: Any, *, per_token: bool = False) -> Outcome:
    """One process, the formulas written out; the last batch's gradients are left unused."""
    outcome = Outcome()
    chunks = [Toy(stage, num_stages) for stage in range(num_stages)]
    optimizer = make_optimizer(chunks)
    data = map(microbatch_of, count())
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        total, num_tokens = torch.zeros((), dtype=torch.float64), 0
        metrics = []
        for tokens, labels, mask in (next(data) for _ in range(num_microbatches)):
            hidden = None
            for chunk in chunks:
                chunk.input_tensor = hidden
                hidden = chunk(tokens, labels)
            loss, *counted, of_microbatch = loss_func(mask, hidden)
            metrics.append(of_microbatch["lm loss"].tolist())
            num_tokens += int(mask.sum())
            total = total + (loss if per_token or not counted else loss / max(int(mask.sum()), 1))
        (total / (num_tokens if per_token else num_microbatches)).backward()
        outcome.metrics.append(metrics)
        if step < STEPS:
            optimizer.step()
    for stage, chunk in enumerate(chunks):
        outcome.note(stage, chunk)
    return outcome


def chunks_of(function: ForwardBackward, schedule: Schedule, settings: Any = None) -> list[Toy]:
    """This rank's chunks."""
    num_chunks = schedule.placement.num_chunks
    stages = function.stages(schedule.num_microbatches, num_chunks)
    return [Toy(stage, schedule.num_stages, settings) for stage in stages]


def train(context: RankContext, schedule: Schedule, loss_func: Any, settings: Any = None) -> Outcome:
    """Megatron-LM's loop on one rank, with a validation between the steps."""
    outcome = Outcome()
    forward_backward_func = get_forward_backward_func(schedule=schedule, transport=context.transport)
    chunks = chunks_of(forward_backward_func, schedule, settings)
    optimizer = make_optimizer(chunks)
    run = partial(forward_backward_func, forward_step_func=partial(forward_step, loss_func), model=chunks, **SHAPE)
    data = [iterator_for(chunk) for chunk in chunks]
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        metrics = run(data_iterator=data, num_microbatches=schedule.num_microbatches)
        assert not any(entry["lm loss"].requires_grad for entry in metrics)
        outcome.metrics.append([entry["lm loss"].tolist() for entry in metrics])
        validation = [iterator_for(chunk) for chunk in chunks]
        run(data_iterator=validation, num_microbatches=3, forward_only=True)
        if step < STEPS:
            optimizer.step()
    for stage, chunk in zip(forward_backward_func.stages(schedule.num_microbatches, len(chunks)), chunks):
        outcome.note(stage, chunk)
    return outcome


def assert_trains_as_plainly(schedule: Schedule, loss_func: Any, settings: Any = None) -> None:
    per_token = settings is not None and settings.calculate_per_token_loss
    outcomes = launch_local(train, schedule.num_ranks, backend="threads", args=(schedule, loss_func, settings))
    compare(outcomes, plain(schedule.num_stages, schedule.num_microbatches, loss_func, per_token=per_token), schedule)


def compare(outcomes: list[Outcome], expected: Outcome, schedule: Schedule) -> None:
    """Each rank has the plain loop's gradients and weights; those with the last stage its microbatches' metrics."""
    last = schedule.num_stages - 1
    for rank, outcome in enumerate(outcomes):
        here = [i for i in range(schedule.num_microbatches) if schedule.placement.rank_of(last, i) == rank]
        for ours, theirs in zip(outcome.metrics, expected.metrics):
            assert len(ours) == len(here)
            for microbatch, values in zip(here, ours):
                assert values == pytest.approx(theirs[microbatch], rel=TOLERANCE)
        for mine, plains in ((outcome.gradients, expected.gradients), (outcome.weights, expected.weights)):
            assert {stage for stage, _ in mine} == set(schedule.placement.stages_of(rank))
            for key, tensor in mine.items():
                torch.testing.assert_close(tensor, plains[key], rtol=TOLERANCE, atol=TOLERANCE)


CASES = [
    case
    for name in synchronous_names()
    for case in schedules_of(name, (1, 2, 4), (8,))
    if case.placement.num_chunks <= 2
]


@pytest.mark.parametrize("schedule", CASES, ids=label)
def test_equals_plain_loop(schedule: Schedule) -> None:
    assert_trains_as_plainly(schedule, mean)


@pytest.mark.parametrize("name", ["gpipe", "zb-h1", "interleaved", "dualpipe"])
def test_num_tokens_divide_each_microbatch_also_one_without_tokens(name: str) -> None:
    assert_trains_as_plainly(create(name, num_ranks=2, num_microbatches=4), mean_of_masked)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "dualpipe"])
def test_per_token_loss_is_the_mean_over_all_tokens_of_the_batch(name: str) -> None:
    schedule = create(name, num_ranks=2, num_microbatches=4)
    assert_trains_as_plainly(schedule, mean_of_masked, config(calculate_per_token_loss=True))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipe"])
def test_a_finalize_function_gets_sums_and_the_number_of_all_tokens(name: str) -> None:
    schedule = create(name, num_ranks=2, num_microbatches=4)
    settings = config(calculate_per_token_loss=True, finalize_model_grads_func=divide)
    assert_trains_as_plainly(schedule, mean_of_masked, settings)


def divide(chunks: list[Toy], num_tokens: Tensor | None) -> None:
    """What is left of Megatron-LM's finalize_model_grads without data parallelism."""
    assert num_tokens is not None
    assert num_tokens.dtype is torch.int
    for chunk in chunks:
        for parameter in chunk.parameters():
            assert parameter.grad is not None
            parameter.grad /= num_tokens


TIED = [["embedding.weight", "output_layer.weight"]]
MAX_NORM = 0.3


@pytest.mark.parametrize(
    "name", [name for name in ("1f1b", "zb-h1", "interleaved", "zbv", "dualpipev") if name in names()]
)
def test_tied_embeddings_and_clipping_are_those_of_one_process(name: str) -> None:
    schedule = create(name, num_ranks=2, num_microbatches=4)
    outcomes = launch_local(train_tied, 2, backend="threads", args=(schedule,))
    norms, weights = train_tied_plainly(schedule.num_stages, 4)
    merged = {key: tensor for _, own in outcomes for key, tensor in own.items()}
    assert min(norms) > MAX_NORM
    for own_norms, _ in outcomes:
        assert own_norms == pytest.approx(norms, rel=TOLERANCE)
    assert set(merged) == set(weights)
    for key, tensor in merged.items():
        torch.testing.assert_close(tensor, weights[key], rtol=TOLERANCE, atol=TOLERANCE)
    first, last = merged[0, "embedding.weight"], merged[schedule.num_stages - 1, "output_layer.weight"]
    assert torch.equal(first, last)


def train_tied(context: RankContext, schedule: Schedule) -> tuple[list[float], dict[tuple[int, str], Tensor]]:
    """Some steps of one rank: the norms of all gradients and the weights in the end."""
    function = get_forward_backward_func(schedule=schedule, transport=context.transport, tied=TIED)
    chunks = chunks_of(function, schedule)
    optimizer = make_optimizer(chunks)
    data = [iterator_for(chunk) for chunk in chunks]
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        arguments = {"data_iterator": data, "model": chunks, "num_microbatches": 4} | SHAPE
        function(forward_step_func=partial(forward_step, mean), **arguments)
        norms.append(function.clip_grad_norm_(MAX_NORM))
        optimizer.step()
    return norms, weights_of(zip(function.stages(4, len(chunks)), chunks))


def train_tied_plainly(num_stages: int, num_microbatches: int) -> tuple[list[float], dict[tuple[int, str], Tensor]]:
    """The same in one process, with one weight at both ends."""
    chunks = [Toy(stage, num_stages) for stage in range(num_stages)]
    chunks[-1].output_layer.weight = chunks[0].embedding.weight  # type: ignore[union-attr]
    model = nn.ModuleList(chunks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        for microbatch in range(num_microbatches):
            tokens, labels, _ = microbatch_of(step * num_microbatches + microbatch)
            hidden = None
            for chunk in chunks:
                chunk.input_tensor = hidden
                hidden = chunk(tokens, labels)
            (hidden.mean() / num_microbatches).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return norms, weights_of(enumerate(chunks))


def weights_of(chunks: Iterable[tuple[int, Toy]]) -> dict[tuple[int, str], Tensor]:
    return {
        (stage, name): parameter.detach() for stage, chunk in chunks for name, parameter in chunk.named_parameters()
    }


@pytest.mark.slow
def test_the_example_in_readme_trains(tmp_path: Path) -> None:
    """The text is run as it is pasted."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    examples = [code for code in blocks if "forward_backward_func" in code]
    if not examples:
        pytest.skip("README has no example of forward_backward_func")
    for example in examples:
        (tmp_path / "pasted.py").write_text(example)
        command = [sys.executable, str(tmp_path / "pasted.py")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        losses = ast.literal_eval(done.stdout)
        assert losses[:-1] == [None] * (len(losses) - 1)
        assert losses[-1] < 0.5  # a uniform guess among 32 tokens has a loss of 3.5
