"""Stages that pass all sorts of values on; here, so that processes can import them too."""

from collections.abc import Sequence
from typing import Any

import torch
from modules import Stages
from plain import Result, squared_error
from scenario import Scenario, train_rank
from torch import Tensor, nn

from stagewright.engine import RankContext
from stagewright.schedules import Schedule

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
]


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


class Wraps(nn.Module):
    """Makes every kind of nesting out of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return {
            "tuple": (y, None, [y.tanh(), ()]),
            "empty": {},
            7: {"deep": [({"deeper": y.sin()},)]},
            "again": y,
            "none": None,
        }


class Passes(nn.Module):
    """Hands on what it got, with one member changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Any) -> Any:
        y, nothing, (tanh, empty) = value["tuple"]
        assert nothing is None
        assert empty == ()
        assert value["none"] is None
        assert list(value) == ["tuple", "empty", 7, "again", "none"]
        return {**value, "tuple": (self.linear(y), None, [tanh, ()])}


class Unwraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Any) -> Tensor:
        y, _, (tanh, _) = value["tuple"]
        z: Tensor = self.linear(y + tanh) + value[7]["deep"][0][0]["deeper"] + value["again"]
        return z


class ManyTypes(nn.Module):
    """The numbers of x in every type, integers up to 2**62, infinities and a NaN; and what carries gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return {
            "copies": [_as_type(20 * x.detach(), dtype) for dtype in DTYPES],
            "large": torch.tensor([2**62, -(2**62), 2**62 - 1, -(2**63)]),
            "special": torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0]),
            "graded": [y, y.float(), y.bfloat16(), torch.complex(y, y.sin())],
            "ungraded": y.detach(),
        }


class ChecksTypes(nn.Module):
    """Checks what arrived and uses all that carries a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Any) -> Tensor:
        assert [copy.dtype for copy in value["copies"]] == DTYPES
        x = value["copies"][0]
        for copy, dtype in zip(value["copies"], DTYPES):
            assert torch.equal(copy, _as_type(x, dtype))
            assert not copy.requires_grad
        assert value["large"].tolist() == [2**62, -(2**62), 2**62 - 1, -(2**63)]
        special = value["special"].tolist()
        assert special[:2] == [float("inf"), float("-inf")]
        assert special[2] != special[2]
        assert str(special[3]) == "-0.0"
        assert not value["ungraded"].requires_grad
        double, single, half, complex_ = value["graded"]
        assert [t.requires_grad for t in value["graded"]] == [True] * 4
        z: Tensor = self.linear(double + single.double() + half.double() + complex_.real * complex_.imag)
        return z + value["ungraded"]


def _as_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x > 0 if dtype is torch.bool else (x.abs() if dtype is torch.uint8 else x).to(dtype)


class Shapes(nn.Module):
    """Views, expanded and transposed tensors, tensors without dimensions and without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return {
            "transposed": y.t(),
            "view": y[:, 1:4],
            "strided": y[:, ::2],
            "expanded": y.mean(0, keepdim=True).expand(len(y), 6),
            "scalar": y.sum(),
            "empty": y[:0],
            "nothing": torch.empty(0, 3, dtype=torch.int64),
            "y": y,
        }


class UsesShapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Any) -> Tensor:
        assert value["scalar"].shape == ()
        assert value["empty"].shape == (0, 6)
        assert value["nothing"].shape == (0, 3)
        y = value["y"] + value["transposed"].t() + value["expanded"] * value["scalar"] + value["empty"].sum()
        padded = torch.cat([value["view"], value["strided"]], dim=1)
        z: Tensor = self.linear(y * padded)
        return z


class Varies(nn.Module):
    """Another structure, type and shape for every microbatch, by its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        match int(x.detach()[0, 0].abs().item() * 1000) % 4:
            case 0:
                return y
            case 1:
                return [y[:, :3], None, y[:, 3:]]
            case 2:
                return {"float": y.float(), "beside": [torch.ones(3, dtype=torch.int64)] * 3}
            case _:
                return {"large": y.repeat(1, 400)}


class TakesAny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Any) -> Tensor:
        match value:
            case [left, None, right]:
                value = torch.cat([left, right], dim=1)
            case {"float": y}:
                value = y.double()
            case {"large": y}:
                value = y.unflatten(1, (400, 6)).mean(1)
            case _:
                assert isinstance(value, Tensor)
        z: Tensor = self.linear(value)
        return z


class Skips(nn.Module):
    """A U of four stages: what the first ones make is used by the last ones, and travels along."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.stage = stage

    def forward(self, value: Any) -> Any:
        if self.stage == 0:
            value = {"x": value}
        x = self.linear(value.pop("x"))
        if self.stage in (0, 1):
            value[f"skip{self.stage}"] = x.tanh()
        elif self.stage == 2:
            x = x + value.pop("skip1")
        else:
            return x + value.pop("skip0")
        return {"x": x, **value}


class Sometimes(nn.Module):
    """Its second output matters to some microbatches only, so that for the others there is no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.always(x), self.sometimes(x)


class UsesSometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Any) -> Tensor:
        always, sometimes = value
        z: Tensor = self.linear(always + sometimes if always.detach()[0, 0] > 0 else always)
        return z


class NeverUses(nn.Module):
    """Cuts the graph: nothing before it gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.detach())
        return y


class Rounds(nn.Module):
    """Hands on integers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * 10).long()


class FromIntegers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.int64
        y: Tensor = self.linear(x.double() / 10)
        return y


class Relu(nn.Module):
    """Its very first operation overwrites what it received."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(torch.relu_(x))
        return y


class OverwritesMembers(nn.Module):
    """Overwrites parts of what it received, one of which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Any) -> Any:
        x, other = value if isinstance(value, tuple) else (value, torch.zeros_like(value))
        other.add_(1)
        x[:, :2].mul_(2)
        x += other
        return self.linear(x), other


def loss_of_first(output: Any, target: Tensor) -> Tensor:
    return squared_error(output[0] if isinstance(output, tuple) else output, target)


class Parameterless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * 2


class ReturnsItsWeight(nn.Module):
    """One member of its output is a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Any:
        return x, self.bias


class AddsBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Any) -> Tensor:
        x, bias = value
        y: Tensor = self.linear(x + bias)
        return y


class SkipStages:
    """Each stage knows its number."""

    def __call__(self, stage: int) -> nn.Module:
        return Stages(lambda: Skips(stage))(stage)


# name -> scenario and how many stages it needs at least
SCENARIOS: dict[str, Scenario] = {
    "any nesting": Scenario(Stages(Wraps, Passes, Passes, Unwraps)),
    "all types": Scenario(Stages(Linear, ManyTypes, ChecksTypes, Linear)),
    "views, expanded, scalar and empty tensors": Scenario(Stages(Linear, Shapes, UsesShapes, Linear)),
    "structures that change between microbatches": Scenario(Stages(Varies, TakesAny, Varies, TakesAny)),
    "skip connections": Scenario(SkipStages()),
    "gradients that some microbatches lack": Scenario(Stages(Linear, Sometimes, UsesSometimes, Linear)),
    "gradients that all microbatches lack": Scenario(Stages(Linear, Linear, NeverUses, Linear)),
    "integers alone": Scenario(Stages(Linear, Rounds, FromIntegers, Linear)),
    "in-place first operation": Scenario(Stages(Linear, Relu, Relu, Relu)),
    "in-place on members": Scenario(Stages(OverwritesMembers), loss=loss_of_first),
    "identities": Scenario(Stages(nn.Identity, nn.Identity, nn.Identity, Linear)),
    "stages without parameters": Scenario(Stages(Linear, Parameterless, Parameterless, Parameterless)),
    "parameters as output": Scenario(Stages(Linear, ReturnsItsWeight, AddsBoth, Linear)),
}


def train_all(context: RankContext, schedules: Sequence[Schedule]) -> list[list[Result]]:
    """Every scenario under every schedule, one after the other: starting processes takes long."""
    return [
        [train_rank(context, scenario, {"schedule": schedule}) for scenario in SCENARIOS.values()]
        for schedule in schedules
    ]
