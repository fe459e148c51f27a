"""The optimizers behind --optimizer."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from stagewright.cli.optimizer import MuonWithAdamW, make_optimizer
from stagewright.cli.settings import OPTIMIZERS
from stagewright.models import GPTConfig, GPTStage, build_gpt, token_loss

CONFIG = GPTConfig(vocab_size=11, num_layers=1, hidden_size=8, num_heads=2, sequence_length=6)


def step(model: nn.Module, *optimizers: Optimizer) -> None:
    tokens = torch.arange(12).reshape(2, 6) % 11
    model.zero_grad()
    token_loss(model(tokens), tokens).backward()
    for optimizer in optimizers:
        optimizer.step()


def two_models() -> tuple[GPTStage, GPTStage]:
    model = build_gpt(CONFIG)
    return model, copy.deepcopy(model)


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(name: str) -> None:
    model = build_gpt(CONFIG)
    optimizer = make_optimizer(name, 1e-2, model.named_parameters())
    tokens = torch.arange(12).reshape(2, 6) % 11
    before = token_loss(model(tokens), tokens)
    for _ in range(10):
        step(model, optimizer)
    assert token_loss(model(tokens), tokens) < before - 0.1


def test_muon_trains_the_matrices_of_the_layers_and_adamw_the_rest() -> None:
    whole, apart = two_models()
    matrices = [(n, p) for n, p in apart.named_parameters() if n.startswith("layers.") and p.ndim == 2]
    others = [(n, p) for n, p in apart.named_parameters() if not (n.startswith("layers.") and p.ndim == 2)]
    assert [name for name, _ in matrices] == [
        "layers.0.attention.query_key_value.weight",
        "layers.0.attention.output.weight",
        "layers.0.mlp.widen.weight",
        "layers.0.mlp.narrow.weight",
    ]
    muon = Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = AdamW(others, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    together = MuonWithAdamW(whole.named_parameters(), 1e-2)
    for _ in range(3):
        step(whole, together)
        step(apart, muon, adamw)
    assert equal(whole, apart)


def test_a_rate_set_in_the_parameter_groups_is_that_of_the_next_update() -> None:
    still, moved = two_models()
    for model, rate in ((still, 0.0), (moved, 1e-2)):
        optimizer = MuonWithAdamW(model.named_parameters(), 1e-2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        step(model, optimizer)
    assert equal(still, build_gpt(CONFIG))
    assert not any(torch.equal(p, q) for p, q in zip(moved.parameters(), still.parameters()))


def test_it_goes_on_from_its_state() -> None:
    straight, resumed = two_models()
    optimizer = MuonWithAdamW(straight.named_parameters(), 1e-2)
    earlier = MuonWithAdamW(resumed.named_parameters(), 1e-2)
    step(straight, optimizer)
    step(resumed, earlier)
    later = MuonWithAdamW(resumed.named_parameters(), 5.0)
    later.load_state_dict(earlier.state_dict())
    for _ in range(2):
        step(straight, optimizer)
        step(resumed, later)
    assert equal(straight, resumed)
    for group in later.param_groups:
        group["lr"] = 0.0
    step(resumed, later)
    assert equal(straight, resumed), "its groups are still those that it steps by"


def test_a_stage_without_matrices_has_adamw_alone() -> None:
    norm = nn.LayerNorm(4)
    optimizer = MuonWithAdamW(norm.named_parameters(), 1e-2)
    norm(torch.arange(4.0)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(norm.weight, torch.ones(4))
