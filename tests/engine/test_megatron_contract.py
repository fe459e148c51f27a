"""What Megatron-LM's trainers rely on beside losses and gradients, one line of the contract a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from megatron_toy import LENGTH, ROWS, SHAPE, Toy, config, forward_step, iterator_for, mean, microbatch_of
from plain import TOLERANCE
from torch import Tensor, nn

from stagewright.engine import RankContext, launch_local
from stagewright.engine.megatron import get_forward_backward_func
from stagewright.schedules import Schedule, create


def test_one_chunk_is_1f1b_and_several_are_interleaved_unless_said_otherwise() -> None:
    launch_local(choose_by_default, 2, backend="threads")


def choose_by_default(context: RankContext) -> None:
    function = get_forward_backward_func(transport=context.transport)
    assert function.stages(4) == (context.rank,)
    assert function.stages(4, num_chunks=3) == (context.rank, context.rank + 2, context.rank + 4)
    reversed_way = get_forward_backward_func(schedule="dualpipev", transport=context.transport)
    assert reversed_way.stages(4) == (context.rank, 3 - context.rank)


def make_calls(
    context: RankContext, options: dict[str, Any], calls: list[dict[str, Any]], settings: Any, dropout: float
) -> Any:
    """Some calls one after the other on a fresh chunk: what each returned, and the gradients in the end."""
    function = get_forward_backward_func(transport=context.transport, **options)
    with context.transport.baton:  # making a module draws random numbers, of which thread ranks have but one generator
        chunk = Toy(context.rank, context.num_ranks, settings)
    chunk.block.append(nn.Dropout(dropout))
    arguments = {"forward_step_func": partial(forward_step, mean), "model": chunk, "num_microbatches": 4} | SHAPE
    results = [function(**{"data_iterator": iterator_for(chunk)} | arguments | call) for call in calls]
    return results, {(context.rank, name): parameter.grad for name, parameter in chunk.named_parameters()}


def run_calls(*calls: dict[str, Any], settings: Any = None, dropout: float = 0.0, **options: Any) -> Any:
    """The results and gradients of all ranks."""
    outcomes = launch_local(make_calls, 2, backend="threads", args=(options, list(calls), settings, dropout))
    merged = {key: gradient for _, gradients in outcomes for key, gradient in gradients.items()}
    return [results for results, _ in outcomes], merged


def assert_multiple(gradients: dict[Any, Tensor], reference: dict[Any, Tensor], factor: float) -> None:
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, factor * reference[key], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_are_added_to_what_is_there(schedule: str) -> None:
    _, once = run_calls({}, schedule=schedule)
    _, twice = run_calls({}, {}, schedule=schedule)
    assert_multiple(twice, once, 2)


def test_forward_only_makes_no_gradient_and_returns_every_microbatch() -> None:
    (first, last), gradients = run_calls({"forward_only": True, "num_microbatches": 7}, schedule="zb-h1")
    assert set(gradients.values()) == {None}
    assert first == [[]]
    assert [entry["lm loss"].item() for entry in last[0]] == pytest.approx(
        plain_losses(range(7), num_stages=2), rel=TOLERANCE
    )


def plain_losses(microbatches: Any, num_stages: int) -> list[float]:
    """The mean loss of some microbatches with fresh weights."""
    chunks = [Toy(stage, num_stages) for stage in range(num_stages)]
    losses = []
    for microbatch in microbatches:
        tokens, labels, _ = microbatch_of(microbatch)
        hidden = None
        for chunk in chunks:
            chunk.input_tensor = hidden
            hidden = chunk(tokens, labels)
        losses.append(hidden.mean().item())
    return losses


def test_the_number_of_microbatches_may_change_from_call_to_call() -> None:
    """As in a batch-size ramp-up."""
    _, together = run_calls({"num_microbatches": 2}, {"num_microbatches": 6}, schedule="1f1b")
    _, two = run_calls({"num_microbatches": 2}, schedule="1f1b")
    _, six = run_calls({"num_microbatches": 6}, schedule="1f1b")
    assert_multiple(together, {key: two[key] + six[key] for key in two}, 1)


def test_random_numbers_are_new_in_each_batch_and_depend_on_neither_schedule_nor_validation() -> None:
    train, validate = {"num_microbatches": 2}, {"num_microbatches": 3, "forward_only": True}
    _, reference = run_calls(train, {}, schedule="1f1b", dropout=0.5)
    _, validated = run_calls(validate, train, validate, {}, schedule="gpipe", dropout=0.5)
    assert_multiple(validated, reference, 1)
    _, once = run_calls(train, schedule="1f1b", dropout=0.5)
    _, twice = run_calls(train, train, schedule="1f1b", dropout=0.5)
    _, four = run_calls({}, schedule="1f1b", dropout=0.5)
    assert not any(torch.allclose(twice[key], 2 * once[key]) for key in once)
    assert not any(torch.allclose(reference[key], once[key] + four[key]) for key in once)


def test_other_chunks_may_follow() -> None:
    """One function serves several models, one after the other."""
    launch_local(train_two_models, 2, backend="threads")


def train_two_models(context: RankContext) -> None:
    function = get_forward_backward_func(transport=context.transport)
    gradients = []
    for chunk in (Toy(context.rank, 2), Toy(context.rank, 2)):
        arguments = {"data_iterator": iterator_for(chunk), "model": chunk, "num_microbatches": 2} | SHAPE
        function(forward_step_func=partial(forward_step, mean), **arguments)
        gradients.append([parameter.grad for parameter in chunk.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_non_loss_data_and_outputs_without_loss_function_are_returned_as_they_are() -> None:
    collecting = {"forward_only": True, "collect_non_loss_data": True, "forward_step_func": collect}
    without_loss = {"forward_only": True, "forward_step_func": output_only}
    (first, last), _ = run_calls(collecting, without_loss, schedule="1f1b")
    assert first == [[], []]
    assert last[0] == [("shape", (ROWS, LENGTH))] * 4
    assert [output.mean().item() for output in last[1]] == pytest.approx(plain_losses(range(4), 2), rel=TOLERANCE)


def collect(data_iterator: Any, model: Toy) -> Any:
    output, _ = forward_step(mean, data_iterator, model)
    return output, shape_of


def shape_of(output: Tensor, non_loss_data: bool) -> Any:
    assert non_loss_data
    return "shape", tuple(output.shape)


def output_only(data_iterator: Any, model: Toy) -> Any:
    return forward_step(mean, data_iterator, model)[0], None


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_the_trainers(training: bool) -> None:
    """Megatron-LM's trainer calls model.train() and model.eval() itself, so forward_only must not."""
    launch_local(note_modes, 2, backend="threads", args=(training,))


def note_modes(context: RankContext, training: bool) -> None:
    function = get_forward_backward_func(transport=context.transport)
    chunk = Toy(context.rank, 2).train(training)
    chunk.block[0].training = not training  # type: ignore[union-attr]
    seen: list[tuple[bool, bool]] = []
    chunk.block[3].register_forward_pre_hook(lambda *_: seen.append((chunk.training, chunk.block[0].training)))  # type: ignore[union-attr]
    arguments = {"forward_step_func": partial(forward_step, mean), "model": chunk, "num_microbatches": 2} | SHAPE
    for forward_only in (True, False):
        function(data_iterator=iterator_for(chunk), forward_only=forward_only, **arguments)
    assert seen == [(training, not training)] * 4
    assert chunk.training is training


def test_the_gradient_scaler_scales_gradients_and_not_metrics() -> None:
    _, gradients = run_calls({}, schedule="1f1b")
    results, scaled = run_calls({}, settings=config(grad_scale_func=lambda loss: 1024 * loss), schedule="1f1b")
    assert_multiple(scaled, gradients, 1024)
    assert [entry["lm loss"].item() for entry in results[1][0]] == pytest.approx(plain_losses(range(4), 2))


def test_a_finalize_function_is_called_after_training_alone_and_inside_no_sync_nothing_is_exchanged() -> None:
    launch_local(record_events, 2, backend="threads")


def record_events(context: RankContext) -> None:
    events: list[Any] = []

    @contextmanager
    def no_sync() -> Iterator[None]:
        events.append("enter")
        yield
        events.append("exit")

    def finalize(chunks: list[nn.Module], num_tokens: None, *, pg_collection: str, force_all_reduce: bool) -> None:
        events.append((chunks, num_tokens, pg_collection, force_all_reduce))

    settings = config(no_sync_func=no_sync, finalize_model_grads_func=finalize)
    chunk = Toy(context.rank, 2, settings)
    chunk.register_forward_hook(lambda *_: events.append("forward"))
    function = get_forward_backward_func(transport=context.transport)
    arguments = {"forward_step_func": partial(forward_step, mean), "model": chunk, "num_microbatches": 2} | SHAPE
    arguments |= {"pg_collection": "groups", "force_all_reduce": True}
    function(data_iterator=iterator_for(chunk), **arguments)
    assert events == ["enter", "forward", "forward", "exit", ([chunk], None, "groups", True)]
    events.clear()
    function(data_iterator=iterator_for(chunk), forward_only=True, **arguments)
    assert events == ["forward", "forward"]


@pytest.mark.parametrize(("in_config", "around"), [(True, False), (False, True), (False, False)])
def test_autocast_is_that_of_the_config_or_the_trainers(in_config: bool, around: bool) -> None:
    dtypes = launch_local(output_dtypes, 2, backend="threads", args=(in_config, around))
    assert dtypes == [[], [torch.bfloat16 if in_config or around else torch.float32] * 2]


def output_dtypes(context: RankContext, in_config: bool, around: bool) -> list[torch.dtype]:
    chunk = Toy(context.rank, 2, config(enable_autocast=in_config, autocast_dtype=torch.bfloat16)).float()
    function = get_forward_backward_func(transport=context.transport)
    arguments = {"data_iterator": iterator_for(chunk), "model": chunk, "num_microbatches": 2} | SHAPE
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        return [output.dtype for output in function(forward_step_func=block_only, forward_only=True, **arguments)]


def block_only(data_iterator: Any, model: Toy) -> Any:
    tokens, _, _ = next(data_iterator) if data_iterator is not None else (None, None, None)
    return model.block(model.embedding(tokens) if model.embedding is not None else model.input_tensor), None


class Wrapper(nn.Module):
    """Like DistributedDataParallel or Float16Module: calls what it wraps ``module``, and forwards nothing else."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module(*arguments)


def test_wrapped_chunks_are_looked_through_and_told_of_their_first_microbatch() -> None:
    launch_local(train_wrapped, 2, backend="threads")


def train_wrapped(context: RankContext) -> None:
    chunk = Toy(context.rank, 2, config(grad_scale_func=lambda loss: 0 * loss))
    told: list[int] = []
    calls: list[int] = []
    chunk.set_is_first_microbatch = lambda: told.append(len(calls))  # type: ignore[assignment]
    chunk.register_forward_hook(lambda *_: calls.append(0))
    function = get_forward_backward_func(transport=context.transport)
    arguments = {"forward_step_func": partial(forward_step, mean), "num_microbatches": 3} | SHAPE
    arguments["model"] = Wrapper(Wrapper(chunk))
    function(data_iterator=iterator_for(chunk), **arguments)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in chunk.parameters())
    for first_val_step in (None, True, False):
        function(data_iterator=iterator_for(chunk), forward_only=True, first_val_step=first_val_step, **arguments)
    assert told == [0, 3, 6]


def test_data_of_other_ranks_microbatches_is_skipped() -> None:
    """In bidirectional schedules each end reads half of the batch, and the next batch begins where this one ends."""
    schedule = create("dualpipe", num_ranks=2, num_microbatches=4)
    assert launch_local(read_indices, 2, backend="threads", args=(schedule,)) == [
        {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]},
        {0: [2, 3, 6, 7], 1: [0, 1, 4, 5]},
    ]


def read_indices(context: RankContext, schedule: Schedule) -> dict[int, list[int]]:
    seen: dict[int, list[int]] = {0: [], 1: []}
    function = get_forward_backward_func(schedule=schedule, transport=context.transport)
    chunks = [Toy(stage, 2) for stage in (0, 1)]

    def step(data_iterator: Iterator[int], model: Toy) -> Any:
        index = next(data_iterator)
        seen[chunks.index(model)].append(index)
        tokens, labels, mask = microbatch_of(index)
        return model(tokens, labels), partial(mean, mask)

    iterators = [count(), count()]
    for _ in range(2):
        function(forward_step_func=step, data_iterator=iterators, model=chunks, num_microbatches=4, **SHAPE)
    return seen


def test_a_batch_without_any_token_has_zero_gradients() -> None:
    """Megatron-LM divides by the number of tokens where there are any."""
    call = {"forward_step_func": partial(forward_step, no_tokens), "num_microbatches": 2}
    _, gradients = run_calls(call, settings=config(calculate_per_token_loss=True), schedule="1f1b")
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())


def no_tokens(mask: Tensor, losses: Tensor) -> tuple[Tensor, int, dict[str, Tensor]]:
    return 0 * losses.sum(), 0, {}


def test_a_single_process_needs_no_transport() -> None:
    chunk = Toy(0, 1)
    arguments = {"data_iterator": iterator_for(chunk), "model": [chunk], "num_microbatches": 3} | SHAPE
    metrics = get_forward_backward_func(1)(forward_step_func=partial(forward_step, mean), **arguments)
    assert [entry["lm loss"].item() for entry in metrics] == pytest.approx(plain_losses(range(3), 1), rel=TOLERANCE)
    assert all(parameter.grad is not None for parameter in chunk.parameters())
