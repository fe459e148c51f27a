"""A profile: its file comes back as written, it fits its model alone, and making it changes nothing else."""

import json
import math
import re
from contextlib import nullcontext
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stagewright.models import Cut, PartProfile, Profile, cut_by_profile, cut_sequential, measure_profile
from stagewright.models.cut import Kind, Part, parts_of_transformer

seconds = st.floats(0, 1e9)
counts = st.integers(0, 2**63 - 1)
names = st.text(min_size=1, max_size=20)


def part_profiles(kind: str) -> st.SearchStrategy[PartProfile]:
    return st.builds(PartProfile, names, st.just(kind), *[seconds] * 4, *[counts] * 4)


profiles = st.builds(
    lambda embedding, layers, head, *rest: Profile((*embedding, *layers, *head), *rest),
    st.lists(part_profiles("embedding"), max_size=1),
    st.lists(part_profiles("layer"), min_size=1, max_size=4),
    st.lists(part_profiles("head"), max_size=1),
    st.integers(1, 2**63 - 1),
    names,
    names,
)


def profile_of(*durations: float, parts: tuple[Part, ...] | None = None) -> Profile:
    """A profile whose parts take so many seconds, a third of it forward."""
    named = parts or parts_of_transformer(len(durations) - 2)
    return Profile(
        tuple(
            PartProfile(part.name, part.kind, time / 3, 2 * time / 3, time / 3, time / 3, 8, 4, 2, 8)
            for part, time in zip(named, durations, strict=True)
        ),
        num_rows=4,
        dtype="float32",
        device="cpu",
    )


@given(profiles)
def test_what_is_written_is_read_again(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json()) == profile


def changed(**changes: Any) -> str:
    """A good profile with some members changed, of the whole or, with `part_`, of its second part."""
    whole = json.loads(profile_of(1, 2, 3, 4).to_json())
    for name, value in changes.items():
        if name.startswith("part_"):
            whole["parts"][1][name.removeprefix("part_")] = value
        else:
            whole[name] = value
    return json.dumps(whole)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a profile is JSON: Expecting value"),
        (
            "[]",
            "the whole of a profile must be an object with format, version, num_rows, dtype, device, parts: got []",
        ),
        ("null", "got None; measure it anew"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": 1, "a": 2}', "a profile says everything once: ['a', 'a'] are not distinct"),
        ("1" * 5000, "a number of a profile must be one of at most 20 digits: got '1111"),
        (changed(format="chrome trace"), "must be 'stagewright profile' and 1: got ('chrome trace', 1)"),
        (changed(version=2), "got ('stagewright profile', 2)"),
        (changed(version=True), "got ('stagewright profile', True)"),
        (changed(extra=1), "must be an object with format"),
        (changed(parts=[]), "parts of a profile must be a list of one part or more: got []"),
        (changed(parts={}), "a list of one part or more: got {}"),
        (changed(parts=[3]), "part 0 of a profile must be an object with name, kind, forward"),
        (changed(num_rows=0), "num_rows of a profile must be a whole number from 1"),
        (changed(num_rows=2.0), "got 2.0"),
        (changed(dtype=""), "dtype of a profile must be a text of 1 to 1000 characters: got ''"),
        (changed(device=None), "device of a profile must be a text"),
        (
            changed(part_forward=-1),
            "forward of part 1 of a profile must be a number of seconds from 0 to 1e+09: got -1",
        ),
        (changed(part_forward=True), "forward of part 1"),
        (changed(part_backward=math.nan), "backward of part 1 of a profile must be a number of seconds"),
        (changed(part_backward=math.inf), "got inf"),
        (changed(part_input_gradient="1"), "got '1'"),
        (changed(part_weight_gradient=10**18), "weight_gradient of part 1"),
        (changed(part_activation_bytes=-1), "activation_bytes of part 1 of a profile must be a whole number from 0"),
        (changed(part_output_bytes=2**63), "output_bytes of part 1"),
        (changed(part_num_parameters=1.5), "got 1.5"),
        (changed(part_name="x" * 1001), "name of part 1"),
        (changed(part_kind="norm"), "kind of part 1 of a profile must be one of embedding, layer, head: got 'norm'"),
        (changed(part_kind=["layer"]), "got ['layer']"),
        (changed(part_kind="head"), "kind of part 1 of a profile must be embedding only first, head only last"),
        (changed(part_kind="embedding"), "embedding only first"),
        (changed(part_surprise=1), "part 1 of a profile must be an object"),
        (changed(dtype="x" * 17_000_000), "a profile has at most 16000000 characters"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_anything_else_is_a_value_error_that_says_what(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        Profile.from_json(text)
    assert type(raised.value) is ValueError
    assert len(str(raised.value)) < 500


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.data())
def test_a_damaged_file_is_a_profile_or_a_value_error(data: st.DataObject) -> None:
    text = profile_of(1, 2, 3, 4).to_json()
    if data.draw(st.booleans()):
        start = data.draw(st.integers(0, len(text)))
        text = text[:start] + data.draw(st.text(max_size=6)) + text[start + data.draw(st.integers(0, 20)) :]
    else:
        whole = json.loads(text)
        where = data.draw(st.sampled_from([whole, *whole["parts"]]))
        where[data.draw(st.sampled_from(sorted(where)))] = data.draw(json_values)
        text = json.dumps(whole)
    try:
        profile = Profile.from_json(text)
    except ValueError:
        return
    assert Profile.from_json(profile.to_json()) == profile
    assert all(part.kind in get_args(Kind) and 0 <= part.seconds <= 2e9 for part in profile.parts)


@given(st.text() | json_values.map(json.dumps))
def test_any_text_is_a_profile_or_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="profile"):
        Profile.from_json(text)


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    parts = parts_of_transformer(4)
    assert cut_by_profile(parts, profile_of(1, 1, 1, 1, 1, 1), 2) == Cut((3, 3))
    assert cut_by_profile(parts, profile_of(0.5, 1, 1, 1, 1, 3), 2) == Cut((4, 2))
    assert cut_by_profile(parts, profile_of(0, 1, 1, 1, 1, 8), 3) == Cut((3, 2, 1))


def test_the_profile_of_another_model_is_refused() -> None:
    message = "got one of 6 parts, embedding to head, for a model of 5, embedding to head; profile this model"
    with pytest.raises(ValueError, match=re.escape(message)):
        cut_by_profile(parts_of_transformer(3), profile_of(1, 1, 1, 1, 1, 1), 2)


def test_the_profile_of_a_model_of_other_sizes_is_refused() -> None:
    parts, profile = parts_of_transformer(2), profile_of(1, 1, 1, 1)
    assert cut_by_profile(parts, profile, 2, num_parameters=(2, 2, 2, 2)) == Cut((2, 2))
    message = "got one whose part 2, layers.1, has 2 parameters, for a model where it has 3; profile this model"
    with pytest.raises(ValueError, match=re.escape(message)):
        cut_by_profile(parts, profile, 2, num_parameters=(2, 2, 3, 4))
    with pytest.raises(ValueError, match="got 3 for 4 parts; pass model.num_parameters"):
        cut_by_profile(parts, profile, 2, num_parameters=(2, 2, 2))


@pytest.mark.parametrize("member", [nn.ReLU(inplace=True), nn.Dropout(inplace=True)])
def test_a_part_may_begin_in_place(member: nn.Module) -> None:
    model = cut_sequential(lambda: nn.Sequential(nn.Linear(3, 3), member, nn.Linear(3, 1)))
    profile = measure_profile(model, torch.randn(2, 3), torch.randn(2, 1), nn.functional.mse_loss, num_rounds=1)
    assert profile.parts[1].input_gradient == profile.parts[1].backward > 0


class Counting(nn.Module):
    """Puts another tensor in the place of a buffer, and cannot go on after so many calls."""

    calls: Tensor
    overlapping: Tensor

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("overlapping", torch.ones(1).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        if self.calls > self.limit:
            raise RuntimeError("no further")
        return x * self.overlapping


@pytest.mark.parametrize("limit", [100, 2])
def test_what_is_measured_is_as_before(limit: int) -> None:
    within = nn.Sequential(nn.BatchNorm1d(3), Counting(limit))  # so that a part fails that has changed much already
    model = nn.Sequential(nn.ReLU(inplace=True), within, nn.Linear(3, 1))
    inputs = torch.randn(4, 3)
    buffers = dict(model.named_buffers())
    before, inputs_before = {name: buffer.clone() for name, buffer in buffers.items()}, inputs.clone()
    with pytest.raises(RuntimeError, match="no further") if limit == 2 else nullcontext():
        measure_profile(cut_sequential(lambda: model), inputs, torch.randn(4, 1), nn.functional.mse_loss)
    assert torch.equal(inputs, inputs_before)
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name]
        assert torch.equal(buffer, before[name]), name


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="got 2 layers for 3 stages; use 3 or more layers, or fewer stages"):
        cut_by_profile(parts_of_transformer(2), profile_of(1, 1, 1, 1), 3)
