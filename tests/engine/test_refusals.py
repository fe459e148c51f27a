"""What cannot cross to another stage is a TypeError that names the stage, the member's path and its type."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from crossing import Linear
from plain import make_batch, squared_error
from torch import Tensor, nn

from stagewright.engine import Pipeline

Pair = namedtuple("Pair", "x y")


@dataclass
class Output:
    x: Tensor


class Labelled(Tensor):
    """A subclass that carries more than its numbers."""


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return {"x": self.linear(x), "aux": [None, (self.value,)]}


ONE = torch.ones(1)
REFUSED = [
    (3.5, "output['aux'][1][0] of stage 1 is a float"),
    ("text", "output['aux'][1][0] of stage 1 is a str"),
    (Pair(ONE, ONE), "output['aux'][1][0] of stage 1 is a Pair"),
    (OrderedDict(x=ONE), "output['aux'][1][0] of stage 1 is a OrderedDict"),
    (Output(ONE), "output['aux'][1][0] of stage 1 is a Output"),
    ({"deep": {2: [ONE, 7]}}, "output['aux'][1][0]['deep'][2][1] of stage 1 is a int"),
    ({(1, 2): ONE}, "output['aux'][1][0] of stage 1 has the key (1, 2), a tuple"),
    ({True: ONE}, "output['aux'][1][0] of stage 1 has the key True, a bool"),
    (ONE.to_sparse(), "output['aux'][1][0] of stage 1 is a tensor of torch.sparse_coo, torch.float32"),
    (
        ONE.to(torch.float8_e5m2fnuz),
        "output['aux'][1][0] of stage 1 is a tensor of torch.strided, torch.float8_e5m2fnuz",
    ),
    ([ONE, ONE.as_subclass(Labelled)], "output['aux'][1][0][1] of stage 1 is a Labelled"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[message.split(" is a ")[-1] for _, message in REFUSED])
@pytest.mark.parametrize("train", [True, False])
def test_names_stage_path_and_type(value: Any, message: str, train: bool) -> None:
    modules = {0: Linear().double(), 1: Returns(value), 2: Linear().double()}
    pipe = Pipeline(modules, schedule="interleaved", num_microbatches=2, num_chunks=3, loss_fn=squared_error)
    with pytest.raises(TypeError) as caught:
        (pipe.forward_backward if train else pipe.eval_step)(*make_batch(4, 0))
    assert str(caught.value).startswith(message)
    assert caught.value.__notes__ == ["rank 0 failed at 1F0 (step 0)"]


def test_a_value_nested_into_itself_ends() -> None:
    loop: list[Any] = []
    loop.append(loop)
    modules = {0: Returns(loop), 1: Linear().double()}
    pipe = Pipeline(modules, schedule="interleaved", num_microbatches=1, num_chunks=2, loss_fn=squared_error)
    with pytest.raises(TypeError, match="of stage 0 is nested deeper than 64: pass a flatter value on"):
        pipe.forward_backward(*make_batch(1, 0))


def test_the_last_stage_may_return_anything_that_its_loss_understands() -> None:
    def loss(output: Output, target: Tensor) -> Tensor:
        return squared_error(output.x, target)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6).double()

        def forward(self, x: Tensor) -> Output:
            return Output(self.linear(x))

    pipe = Pipeline({0: Last()}, num_microbatches=2, loss_fn=loss)
    x, y = make_batch(4, 0)
    result = pipe.forward_backward(x, y)
    torch.testing.assert_close(result, squared_error(pipe.modules[0].linear(x), y).detach())  # type: ignore[operator, union-attr]
    with pytest.raises(TypeError, match="output of the last stage is a Output"):
        pipe.predict(x)
