"""The GPT: what it computes, and that cutting it changes nothing."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stagewright.models import TIED_WEIGHTS, GPTConfig, GPTStage, build_gpt, build_gpt_stage, token_loss

NUM_LAYERS = 5


def config_with(dropout: float) -> GPTConfig:
    return GPTConfig(
        vocab_size=31, num_layers=NUM_LAYERS, hidden_size=24, num_heads=3, sequence_length=12, dropout=dropout
    )


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(31, shape, generator=torch.Generator().manual_seed(seed))


def build_stages(config: GPTConfig, num_stages: int) -> list[GPTStage]:
    return [build_gpt_stage(config, stage, num_stages, seed=4, dtype=torch.float64) for stage in range(num_stages)]


def loss_and_gradients(
    stages: list[GPTStage], tokens: Tensor, targets: Tensor, microbatch_seed: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run one microbatch through the stages as a pipeline does: only values cross a boundary, and then gradients."""
    inputs, outputs = [tokens], []
    for stage in stages:
        stage.seed_microbatch(microbatch_seed)
        outputs.append(stage(inputs[-1]))
        inputs.append(outputs[-1].detach().requires_grad_())
    loss = token_loss(outputs.pop(), targets)
    loss.backward()
    for output, received in zip(reversed(outputs), reversed(inputs[1:-1]), strict=True):
        output.backward(received.grad)
    return loss.detach(), {name: p.grad for stage in stages for name, p in stage.named_parameters()}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("num_stages", [2, 3, 4, 5])
def test_the_stages_composed_are_the_whole_model(num_stages: int, dropout: float) -> None:
    config = config_with(dropout)
    tokens, targets = random_tokens(3, 12), random_tokens(3, 12, seed=1)
    whole = build_gpt(config, seed=4, dtype=torch.float64)
    expected_loss, expected = loss_and_gradients([whole], tokens, targets, microbatch_seed=77)
    loss, gradients = loss_and_gradients(build_stages(config, num_stages), tokens, targets, microbatch_seed=77)
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys() == dict(whole.named_parameters()).keys()
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient), name


def test_the_gradient_of_a_tied_weight_is_the_sum_over_its_copies() -> None:
    config = replace(config_with(dropout=0.0), tied=True)
    tokens, targets = random_tokens(3, 12), random_tokens(3, 12, seed=1)
    whole = build_gpt(config, seed=4, dtype=torch.float64)
    expected_loss, expected = loss_and_gradients([whole], tokens, targets, microbatch_seed=77)
    loss, gradients = loss_and_gradients(build_stages(config, 3), tokens, targets, microbatch_seed=77)
    assert torch.equal(loss, expected_loss)
    summed = gradients[TIED_WEIGHTS[0]] + gradients[TIED_WEIGHTS[1]]
    assert torch.allclose(summed, expected[TIED_WEIGHTS[0]], rtol=1e-12, atol=0)


def test_each_microbatch_has_its_own_masks_and_repeats_them_in_any_order() -> None:
    model = build_gpt(config_with(0.1), dtype=torch.float64)
    tokens = random_tokens(2, 12)
    outputs = []
    for microbatch_seed in (1, 2, 1):
        torch.manual_seed(len(outputs))  # what the global generator held before must not matter
        model.seed_microbatch(microbatch_seed)
        outputs.append(model(tokens))
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def test_each_layer_and_the_embedding_have_their_own_masks() -> None:
    model = build_gpt(config_with(0.5), dtype=torch.float64)
    masks = []
    for module in (model.embedding, *model.layers.values()):
        module.dropout.register_forward_hook(lambda _, __, output: masks.append(output != 0))
    model.seed_microbatch(3)
    model(random_tokens(4, 12))
    assert len(masks) == 1 + 2 * NUM_LAYERS
    for index, mask in enumerate(masks):
        assert mask.double().mean().item() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(mask.numel()))
        assert not any(torch.equal(mask, other) for other in masks[:index])


def test_without_a_microbatch_seed_dropout_takes_ambient_random_numbers() -> None:
    model = build_gpt(config_with(0.1))
    tokens = random_tokens(2, 12)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(model(tokens))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(("dropout", "training"), [(0.0, True), (0.1, False)])
def test_a_forward_that_drops_nothing_leaves_the_global_random_state_alone(dropout: float, training: bool) -> None:
    model = build_gpt(config_with(dropout)).train(training)
    model.seed_microbatch(3)
    before = torch.get_rng_state()
    output = model(random_tokens(2, 12))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(output, build_gpt(config_with(0.0))(random_tokens(2, 12)))


def test_a_layer_recomputed_after_another_microbatch_repeats_its_own_masks() -> None:
    class Recomputed(torch.nn.Module):
        def __init__(self, layer: torch.nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *arguments: object) -> Tensor:
            return checkpoint(self.layer, *arguments, use_reentrant=False)

    tokens, targets = random_tokens(2, 12), random_tokens(2, 12, seed=1)
    plain, recomputing = (build_gpt(config_with(0.1), dtype=torch.float64) for _ in range(2))
    for index, layer in recomputing.layers.items():
        recomputing.layers[index] = Recomputed(layer)
    for model in (plain, recomputing):
        losses = []
        for microbatch_seed in (1, 2):
            model.seed_microbatch(microbatch_seed)
            losses.append(token_loss(model(tokens), targets))
        for loss in losses:
            loss.backward()
    for (name, expected), actual in zip(plain.named_parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(actual.grad, expected.grad), name


def test_a_later_token_never_changes_earlier_logits() -> None:
    model = build_gpt(config_with(0.0), dtype=torch.float64)
    tokens = random_tokens(1, 12)
    logits = model(tokens)
    for position in range(12):
        changed = tokens.clone()
        changed[0, position] = (changed[0, position] + 1) % 31
        differs = (model(changed) - logits).abs().amax(dim=-1)[0] > 1e-12
        assert not differs[:position].any()
        assert differs[position:].all(), "and from there on every position sees the change"


def test_a_shorter_sequence_has_the_logits_of_a_prefix() -> None:
    model = build_gpt(config_with(0.0), dtype=torch.float64)
    tokens = random_tokens(2, 12)
    torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5], rtol=0, atol=1e-12)


def test_the_order_of_earlier_tokens_matters() -> None:
    model = build_gpt(config_with(0.0), dtype=torch.float64)
    last = [model(torch.tensor([tokens]))[0, -1] for tokens in ([1, 2, 3], [2, 1, 3])]
    assert (last[0] - last[1]).abs().max() > 1e-9


def test_a_few_steps_learn_a_repeating_text() -> None:
    model = build_gpt(GPTConfig(vocab_size=5, num_layers=2, hidden_size=32, num_heads=2, sequence_length=10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    text = torch.arange(44).remainder(5).reshape(4, 11)
    losses = []
    for _ in range(30):
        loss = token_loss(model(text[:, :-1]), text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(5), abs=0.1), "at first every token is as likely as any other"
    assert losses[-1] < 0.05


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    message = "got 13 tokens for 12 positions; shorten the sequence or build with sequence_length=13"
    with pytest.raises(ValueError, match=re.escape(message)):
        build_gpt(config_with(0.0))(random_tokens(1, 13))


def test_the_loss_is_the_mean_negative_log_likelihood_in_nats() -> None:
    logits = torch.tensor([[[0.0, 0.0], [math.log(3.0), 0.0]]], dtype=torch.float64)
    loss = token_loss(logits, torch.tensor([[0, 1]]))
    assert loss.item() == pytest.approx((math.log(2.0) + math.log(4.0)) / 2, rel=1e-15)


def test_the_loss_of_half_precision_logits_is_computed_in_float32() -> None:
    logits = torch.randn(2, 12, 31, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = random_tokens(2, 12)
    loss = token_loss(logits, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(token_loss(logits.double(), targets).item(), rel=1e-6)


def test_targets_for_other_tokens_are_refused() -> None:
    message = "got logits [2, 12, 31] for targets [2, 11]; pass targets [2, 12]"
    with pytest.raises(ValueError, match=re.escape(message)):
        token_loss(torch.zeros(2, 12, 31), random_tokens(2, 11))
