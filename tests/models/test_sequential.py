"""Cutting an `nn.Sequential` between its members."""

import re
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagewright.models import Cut, build_stage, cut_sequential
from stagewright.models.initialise import derive_seed


def convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))


class Scaled(nn.Module):
    """A module with a parameter that it does not fill by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Masked(nn.Module):
    """A module with a tensor of which `filled` says what its `reset_parameters` does."""

    mask: Tensor | list[Tensor]

    def __init__(self, kind: str, filled: str = "", mask: Tensor | None = None) -> None:
        super().__init__()
        self.linear, self.filled = nn.Linear(3, 3), filled
        mask = torch.ones(3, 3, dtype=torch.bool).tril() if mask is None else mask
        match kind:
            case "buffer":
                self.register_buffer("mask", mask)
            case "plain":
                self.mask = mask
            case "listed":
                self.mask = [mask]
            case "hidden":
                self.layers = [nn.Linear(3, 3)]

    def reset_parameters(self) -> None:
        if self.filled == "anew":
            self.mask = torch.ones(3, 3, dtype=torch.bool).tril()
        elif self.filled:
            self.mask.fill_(True).tril_()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.mask.to(x.dtype)


def sharing_a_tensor(kind: str) -> nn.Sequential:
    mask = torch.ones(3, 3)
    return nn.Sequential(Masked(kind, mask=mask), Masked(kind, mask=mask))


def test_a_state_dict_goes_from_stages_to_the_whole_and_back() -> None:
    model, whole = cut_sequential(convolutions), convolutions()
    cut = Cut((1, 2, 2))
    stages = [build_stage(model, cut, stage, seed=2) for stage in range(3)]
    united = {name: tensor for stage in stages for name, tensor in stage.state_dict().items()}
    whole.load_state_dict(united)
    images = torch.randn(3, 1, 4, 4)
    activation = images
    for stage in stages:
        activation = stage(activation)
    assert torch.equal(activation, whole(images))
    fresh = convolutions().state_dict()
    for stage in stages:
        stage.load_state_dict({name: fresh[name] for name in stage.state_dict()})
    assert torch.equal(stages[0].state_dict()["0.weight"], fresh["0.weight"])


def test_each_module_is_filled_as_its_class_does_from_the_seed_and_its_name() -> None:
    stage = build_stage(cut_sequential(convolutions), Cut((4, 1)), 1, seed=7)
    torch.manual_seed(derive_seed(7, "4"))
    expected = nn.Linear(16, 5)
    assert torch.equal(stage.state_dict()["4.weight"], expected.weight)
    assert torch.equal(stage.state_dict()["4.bias"], expected.bias)


def test_statistics_of_norms_begin_as_they_do_in_their_class() -> None:
    stage = build_stage(cut_sequential(convolutions), Cut((1, 4)), 1)
    norm = stage.get_submodule("1")
    assert torch.equal(norm.running_mean, torch.zeros(4))
    assert torch.equal(norm.running_var, torch.ones(4))
    assert norm.num_batches_tracked == 0


def test_attention_is_filled_as_its_class_does() -> None:
    model = cut_sequential(lambda: nn.Sequential(nn.Linear(2, 4), nn.TransformerEncoderLayer(4, 2, 8)))
    stage = build_stage(model, Cut((1, 1)), 1)
    attention = stage.get_submodule("1.self_attn")
    assert torch.equal(attention.in_proj_bias, torch.zeros(12))
    assert torch.equal(attention.out_proj.bias, torch.zeros(4))
    assert attention.in_proj_weight.abs().max() <= (6 / 16) ** 0.5  # Xavier, as in the class


def test_a_model_that_is_there_already_is_taken_as_it_is() -> None:
    whole = convolutions().double()
    model = cut_sequential(lambda: whole)
    stages = [build_stage(model, Cut((2, 3)), stage) for stage in range(2)]
    assert stages[0].get_submodule("0") is whole[0]
    assert stages[1].get_submodule("4") is whole[4]
    assert stages[1].get_submodule("4").weight.dtype == torch.float64


def test_names_given_to_members_are_kept() -> None:
    members = OrderedDict(first=nn.Linear(2, 2), second=nn.Linear(2, 2))
    model = cut_sequential(lambda: nn.Sequential(members))
    assert [part.name for part in model.parts] == ["first", "second"]
    assert list(build_stage(model, Cut((1, 1)), 1).state_dict()) == ["second.weight", "second.bias"]


def test_members_that_are_shared_are_refused() -> None:
    def twice() -> nn.Sequential:
        linear = nn.Linear(2, 2)
        return nn.Sequential(linear, nn.ReLU(), linear)

    def sharing() -> nn.Sequential:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        second.weight = first.weight
        return nn.Sequential(first, second)

    with pytest.raises(ValueError, match="got 3 members of which only 2 are distinct; make each a module of its own"):
        cut_sequential(twice)
    with pytest.raises(ValueError, match="members 0 and 1 share a parameter; give each its own"):
        cut_sequential(sharing)
    for attribute in ("buffer", "plain", "listed"):
        with pytest.raises(ValueError, match="members 0 and 1 share a tensor; give each its own, or make them one"):
            cut_sequential(partial(sharing_a_tensor, attribute))


def test_what_a_member_shares_within_itself_stays_shared() -> None:
    def sharing_inside() -> nn.Sequential:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        second.weight = first.weight
        return nn.Sequential(nn.ReLU(), nn.Sequential(first, second))

    stage = build_stage(cut_sequential(sharing_inside), Cut((1, 1)), 1)
    assert stage.get_parameter("1.0.weight") is stage.get_parameter("1.1.weight")
    assert not stage.get_parameter("1.0.weight").is_meta


def test_a_module_that_cannot_fill_itself_is_refused_with_its_name() -> None:
    model = cut_sequential(lambda: nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), Scaled())))
    message = "1.1, a Scaled, has scale and no reset_parameters; give it that method, or build the model with memory"
    with pytest.raises(ValueError, match=re.escape(message)):
        build_stage(model, Cut((1, 1)), 1)
    assert build_stage(model, Cut((1, 1)), 0)(torch.ones(1, 3)).shape == (1, 3), "the other stage has none of it"


@pytest.mark.parametrize(("kind", "filled"), [("buffer", "in place"), ("buffer", "anew"), ("plain", "anew")])
def test_what_reset_parameters_fills_is_there(kind: str, filled: str) -> None:
    """Buffers, and tensors that are no buffers too."""
    stage = build_stage(cut_sequential(lambda: nn.Sequential(nn.ReLU(), Masked(kind, filled))), Cut((1, 1)), 1)
    assert torch.equal(stage.get_submodule("1").mask, torch.ones(3, 3, dtype=torch.bool).tril())
    assert stage(torch.ones(2, 3)).shape == (2, 3)


@pytest.mark.parametrize(
    ("kind", "filled", "message"),
    [
        (
            "buffer",
            "",
            "1, a Masked, has mask and a reset_parameters that does not fill it; let it do so, or build the",
        ),
        (
            "plain",
            "",
            "1, a Masked, has in mask what is neither parameter nor buffer, and is not filled; let reset_para",
        ),
        ("plain", "in place", "1, a Masked, has in mask what is neither parameter nor buffer, and is not filled"),
        ("listed", "", "1, a Masked, has in mask what is neither parameter nor buffer, and is not filled"),
        ("hidden", "", "1, a Masked, has in layers what is neither parameter nor buffer, and is not filled"),
    ],
)
def test_what_nobody_fills_is_refused_when_its_stage_is_built(kind: str, filled: str, message: str) -> None:
    """It stayed on the meta device, or held whatever lay in memory."""
    model = cut_sequential(lambda: nn.Sequential(nn.Linear(3, 3), Masked(kind, filled)))
    with pytest.raises(ValueError, match=re.escape(message)):
        build_stage(model, Cut((1, 1)), 1)
    assert build_stage(model, Cut((1, 1)), 0)(torch.ones(1, 3)).shape == (1, 3), "the other stage has none of it"
    whole = nn.Sequential(nn.Linear(3, 3), Masked(kind, filled))
    assert build_stage(cut_sequential(lambda: whole), Cut((1, 1)), 1).get_submodule("1") is whole[1]


class Numbers(nn.Module):
    """Buffers of several types, filled one way or another, or not at all."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool):
            self.register_buffer(str(dtype).replace("torch.", "of_"), torch.zeros(70, dtype=dtype))

    def reset_parameters(self) -> None:
        for buffer in self.buffers():
            if self.way == "data":
                buffer.data.zero_()
            elif self.way == "same":  # what was there before, by chance
                buffer.copy_(buffer.clone())


def test_a_buffer_of_any_type_that_nobody_fills_is_found() -> None:
    left = "has of_float64, of_bfloat16, of_complex64, of_int64, of_uint8, of_bool and a reset_parameters that does not"
    for way in ("data", "same"):
        stage = cut_sequential(lambda way=way: nn.Sequential(Numbers(way))).build(range(1))
        assert way == "same" or not any(buffer.any() for buffer in stage.buffers())
    with pytest.raises(ValueError, match=left):
        cut_sequential(lambda: nn.Sequential(Numbers(""))).build(range(1))


class Listed(nn.Module):
    """Fills the parameters of a list, which has no reset_parameters itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(2), torch.zeros(3)])

    def reset_parameters(self) -> None:
        for weight in self.weights:
            nn.init.ones_(weight)


def test_a_module_may_fill_those_within_it() -> None:
    stage = cut_sequential(lambda: nn.Sequential(Listed())).build(range(1))
    assert [parameter.tolist() for parameter in stage.parameters()] == [[1, 1], [1, 1, 1]]


def test_modules_that_have_their_parameters_in_a_list_too() -> None:
    """An LSTM went on with those on the meta device."""
    stage = build_stage(cut_sequential(lambda: nn.Sequential(nn.Linear(2, 3), nn.LSTM(3, 4))), Cut((1, 1)), 1)
    output, _ = stage(torch.ones(5, 1, 3))
    assert output.shape == (5, 1, 4)
    assert output.isfinite().all()


class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Owning(nn.Sequential):
    def __init__(self, kind: str) -> None:
        super().__init__(nn.Linear(2, 2))
        if kind == "parameter":
            self.scale = nn.Parameter(torch.ones(2))
        elif kind == "plain":
            self.scale = torch.ones(2)
        else:
            self.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            nn.Sequential,
            ValueError,
            "a model has at least 1 part: got a Sequential without members; put in what computes",
        ),
        (
            lambda: nn.ModuleList([nn.Linear(2, 2)]),
            TypeError,
            "only an nn.Sequential says in which order its members are called: got ModuleList; return nn.Sequential(*m",
        ),
        (lambda: nn.Linear(2, 2), TypeError, "got Linear; return nn.Sequential(*members)"),
        (lambda: [nn.Linear(2, 2)], TypeError, "got list; return nn.Sequential(*members)"),
        (nn.Sequential(nn.Linear(2, 2)), TypeError, "cut_sequential takes what builds a Sequential: got Sequential "),
        (Twice, ValueError, "a model has at least 1 part: got a Sequential without members"),
        (
            lambda: Twice(nn.Linear(2, 2)),
            ValueError,
            "got Twice with a forward of its own; make what that does a member",
        ),
        (partial(Owning, "parameter"), ValueError, "got Owning with scale of its own; give that to a member"),
        (partial(Owning, "plain"), ValueError, "got Owning with scale of its own; give that to a member"),
        (partial(Owning, "hook"), ValueError, "got Owning with hooks of its own; give that to a member"),
    ],
)
def test_what_is_more_or_less_than_its_members_in_turn_is_refused(
    build: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        cut_sequential(build)
