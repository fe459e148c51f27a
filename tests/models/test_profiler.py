"""What is measured of each part; how long anything took is never asserted."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagewright.models import (
    GPT,
    GPTConfig,
    Profile,
    UNetConfig,
    cut_by_profile,
    cut_sequential,
    measure_profile,
    token_loss,
    unet,
)
from stagewright.models.profiler import Trial

CONFIG = GPTConfig(vocab_size=11, num_layers=3, hidden_size=8, num_heads=2, sequence_length=5, dropout=0.1)


def measure(**options: Any) -> Profile:
    tokens = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(0))
    return measure_profile(GPT(CONFIG), tokens, tokens, token_loss, num_rounds=1, **options)


def test_every_part_is_measured_and_the_profile_cuts_its_model() -> None:
    profile = measure()
    assert [(part.name, part.kind) for part in profile.parts] == [(part.name, part.kind) for part in GPT(CONFIG).parts]
    assert (profile.num_rows, profile.dtype, profile.device) == (2, "float32", "cpu")
    assert Profile.from_json(profile.to_json()) == profile
    assert cut_by_profile(GPT(CONFIG).parts, profile, 3).num_stages == 3


def test_times_are_those_of_what_there_is_to_compute() -> None:
    embedding, *layers, head = measure().parts
    for part in (*layers, head):
        assert part.forward > 0
        assert part.backward == pytest.approx(part.input_gradient + part.weight_gradient)
        assert part.backward > 0
    assert embedding.input_gradient == 0, "tokens have no gradient"
    assert embedding.weight_gradient == embedding.backward > 0


def test_a_part_without_weights_has_an_input_gradient_alone() -> None:
    model = cut_sequential(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)))
    profile = measure_profile(model, torch.randn(2, 3), torch.randn(2, 1), nn.functional.mse_loss, num_rounds=1)
    assert profile.parts[1].weight_gradient == 0
    assert profile.parts[1].input_gradient == profile.parts[1].backward > 0
    assert profile.parts[0].input_gradient == 0, "nobody wants the gradient of the batch"


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8), (torch.bfloat16, 2)])
def test_bytes_and_parameters_are_exact(dtype: torch.dtype, size: int) -> None:
    profile = measure(dtype=dtype)
    for part, num_parameters in zip(profile.parts, GPT(CONFIG).num_parameters(), strict=True):
        assert part.num_parameters == num_parameters
        assert part.parameter_bytes == num_parameters * size
    assert [part.output_bytes for part in profile.parts] == [2 * 5 * 8 * size] * 4 + [2 * 5 * 11 * size]
    assert profile.dtype == str(dtype).removeprefix("torch.")


def test_activations_are_what_the_forward_keeps_each_memory_once_and_no_weights() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 5, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).square().square()

    trial = Trial(Squares(), torch.randn(7, 6), None)
    output, saved = trial.output()
    assert saved == (7 * 6 + 7 * 5 + 7 * 5) * 4, "the input for the weight, and what each square squares"
    assert not output.grad_fn


def test_what_crosses_may_be_of_any_structure() -> None:
    model = unet(UNetConfig(channels=4, depth=2, groups=2))
    images, targets = torch.randn(2, 1, 8, 8), torch.randn(2, 2, 8, 8)
    profile = measure_profile(model, images, targets, nn.functional.mse_loss, num_rounds=1)
    after_down = 2 * 4 * (4 * 4 + 8 * 8) * 4  # the activation, and the skip that it does not need any more itself
    assert profile.parts[0].output_bytes == after_down
    assert [part.name for part in profile.parts] == ["down.0", "down.1", "middle", "up.1", "up.0", "head"]


def test_a_loss_with_a_count_is_understood() -> None:
    def summed(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (output - target).square().sum(), torch.tensor(target.numel())

    model = cut_sequential(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    profile = measure_profile(model, torch.randn(2, 3), torch.randn(2, 1), summed, num_rounds=1)
    assert profile.parts[1].backward > 0


def test_one_part_is_in_memory_at_a_time_and_the_random_state_is_left_alone() -> None:
    built: list[range] = []

    class Watched(GPT):
        def build(self, parts: range, **options: Any) -> Any:
            built.append(parts)
            return super().build(parts, **options)

    tokens = torch.zeros(1, 5, dtype=torch.int64)
    before = torch.get_rng_state()
    measure_profile(Watched(CONFIG), tokens, tokens, token_loss, num_rounds=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert built == [range(part, part + 1) for part in range(5)]
