"""Cutting an `nn.Sequential` between its members."""

import re
from collections import OrderedDict

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
