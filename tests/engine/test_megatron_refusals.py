"""What does not fit the Megatron adapter is refused with the rule, the numbers and the remedy."""

from functools import partial
from itertools import count, islice
from typing import Any

import pytest
from megatron_toy import SHAPE, Toy, config, forward_step, mean, microbatch_of
from torch import Tensor, nn, ones

from stagewright.engine import RankContext, launch_local
from stagewright.engine.megatron import get_forward_backward_func
from stagewright.schedules import create


def without_loss(data_iterator: Any, model: Toy) -> Any:
    """Megatron-LM allows this in forward_only."""
    return forward_step(mean, data_iterator, model)[0], None


def returning(result: Any, data_iterator: Any, model: Toy) -> Any:
    """A forward step whose loss function returns something else."""
    output, _ = forward_step(mean, data_iterator, model)
    return output, partial(give, result)


def give(result: Any, output: Tensor) -> Any:
    return result


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("2 ranks: got pp_size=3", {"pp_size": 3}),
        ("vp_size is the number of chunks: got vp_size=2 and 1 chunks", {"vp_size": 2}),
        ("one chunk for each stage of a rank: got 1, and rank", {"schedule": "dualpipev"}),
        ("8 microbatches, not num_microbatches=4", {"schedule": create("1f1b", num_ranks=2, num_microbatches=8)}),
        ("has its options already", {"schedule": create("1f1b", num_ranks=2, num_microbatches=4), "deep_warmup": True}),
        ("no option 'depth'", {"schedule": "1f1b", "depth": 2}),
    ],
)
def test_options_that_do_not_fit_are_refused(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        launch_local(call_badly, 2, backend="threads", args=(options, {}))


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "at least one microbatch: got num_microbatches=0", {"num_microbatches": 0}),
        (ValueError, "got 2 for 1 chunks", {"data_iterator": [None, None]}),
        (ValueError, "num_microbatches=4: that of stage 0 ended at microbatch 3", {"num_items": 3}),
        (ValueError, "needs forward_only=True", {"collect_non_loss_data": True}),
        (ValueError, "leave p2p_communicator out", {"p2p_communicator": object()}),
        (ValueError, "config.grad_sync_func; turn overlap_grad_reduce", {"settings": config(grad_sync_func=print)}),
        (TypeError, r"Linear, has no such method", {"model": nn.Linear(1, 1)}),
        (TypeError, r"\(output, loss_func\): got a tensor of shape \(2,\)", {"forward_step_func": lambda *_: ones(2)}),
        (TypeError, r"training needs a loss: .* \(output, None\)", {"forward_step_func": without_loss}),
        (
            TypeError,
            r"\(loss, num_tokens, metrics\): got 4 values",
            {"forward_step_func": partial(returning, (1,) * 4)},
        ),
        (
            TypeError,
            r"returned a tensor of shape \(2, 5\)",
            {"forward_step_func": partial(returning, (ones(2, 5), {}))},
        ),
        (TypeError, "returned float", {"forward_step_func": partial(returning, (0.5, {}))}),
        (TypeError, "with calculate_per_token_loss, .* got 2", {"settings": config(calculate_per_token_loss=True)}),
    ],
)
def test_what_does_not_keep_to_the_contract_is_refused(
    error: type[Exception], message: str, call: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        launch_local(call_badly, 2, backend="threads", args=({}, call))


def call_badly(context: RankContext, options: dict[str, Any], call: dict[str, Any]) -> None:
    function = get_forward_backward_func(transport=context.transport, **options)
    chunk = Toy(context.rank, 2, call.get("settings"))
    items = islice(map(microbatch_of, count()), call.get("num_items", 4))
    arguments = {"forward_step_func": partial(forward_step, mean), "model": chunk, "num_microbatches": 4} | SHAPE
    wrong = {name: value for name, value in call.items() if name not in ("settings", "num_items")}
    function(**{"data_iterator": items} | arguments | wrong)


def test_a_picked_iterator_gives_one_item_a_microbatch() -> None:
    with pytest.raises(ValueError, match="asked for a second one"):
        launch_local(read_twice, 2, backend="threads")


def read_twice(context: RankContext) -> None:
    function = get_forward_backward_func(schedule="dualpipe", transport=context.transport)
    arguments = {"data_iterator": [count(), count()], "model": [Toy(0, 2), Toy(1, 2)], "num_microbatches": 4} | SHAPE
    function(forward_step_func=lambda data_iterator, model: (next(data_iterator), next(data_iterator)), **arguments)
