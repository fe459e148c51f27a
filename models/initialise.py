"""Initial parameters that depend on the seed and the parameter's name, never on the rank that holds it."""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from stagewright.models.meta import is_blank

STANDARD_DEVIATION: Final = 0.02

# What `GPTConfig.tied` makes one weight; on a stage that has both, only the first is a parameter of its own.
TIED_WEIGHTS: Final = ("embedding.tokens.weight", "head.projection.weight")


class Constants(nn.Module):
    """A module that has no parameters but buffers, which `reset_parameters` computes."""

    def reset_parameters(self) -> None:
        """Compute the buffers."""
        raise NotImplementedError


class ResidualProjection(nn.Linear):
    """The linear map that ends a residual branch; initialised smaller, so that the sum of many keeps its scale."""


def derive_seed(seed: int, name: str) -> int:
    """Derive the seed of the part of the model called `name` from a seed for the whole.

    It is the first 63 bits of SHA-256 of the text `"{seed}:{name}"`: the same in every process and on every machine
    (Python's own `hash` of a string is not), and unrelated for neighbouring seeds and names.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def initialise(model: nn.Module, *, seed: int, num_layers: int) -> None:
    """Fill the parameters of a model, or of one stage of it, as GPT-2 does.

    Weights are normal with a standard deviation of 0.02, divided by sqrt(2 * num_layers) for the projections that end
    a residual branch, of which there are two a layer; biases are 0; norms are the identity ("Language Models are
    Unsupervised Multitask Learners", section 2.3). `num_layers` counts the layers of the whole model.

    Each weight is drawn from its own generator, seeded with `derive_seed(seed, <name of the parameter>)`, in float32
    on the CPU, and then copied to its device and dtype. So every cut of the model, on every device, starts from the
    same numbers, and torch's global random state is left alone.
    """
    for module_name, module in model.named_modules():
        match module:
            case nn.LayerNorm() | nn.RMSNorm() | Constants():
                module.reset_parameters()
            case ResidualProjection():
                fill_linear(module, module_name, seed, STANDARD_DEVIATION / math.sqrt(2 * num_layers))
            case nn.Linear():
                fill_linear(module, module_name, seed, STANDARD_DEVIATION)
            case nn.Embedding():
                fill_normal(module.weight, f"{module_name}.weight", seed, STANDARD_DEVIATION)
            case _:
                slots = [*module._parameters.items(), *module._buffers.items()]
                left = [name for name, tensor in slots if tensor is not None]
                assert not left, f"no rule initialises {left} of {module_name}, a {type(module).__name__}"


def reset_by_name(model: nn.Module, seed: int, names: list[str]) -> None:
    """Let each of the modules called `names`, and those around them, fill itself as its class does when it is made:
    inner ones first.

    Each draws from torch's global generator, seeded with `derive_seed(seed, <name of the module>)` and put back
    afterwards. Raises `ValueError` for a module with a tensor that nobody has filled.
    """
    around = {name for whole in names for name in _and_around(whole)}
    versions = {tensor: tensor._version for name in names for tensor in _own(model.get_submodule(name)).values()}
    for name, module in reversed([(name, module) for name, module in model.named_modules() if name in around]):
        reset = _reset_of(module)
        if reset is not None:
            with drawing_from(derive_seed(seed, name)):
                reset()
    for name in names:
        module = model.get_submodule(name)
        left = [
            slot
            for slot, tensor in _own(module).items()
            if tensor._version == versions.get(tensor) and is_blank(tensor)
        ]
        if left:
            what = "no reset_parameters" if _reset_of(module) is None else "a reset_parameters that does not fill it"
            remedy = "give it that method" if _reset_of(module) is None else "let it do so"
            raise ValueError(
                f"a module built on the meta device fills itself: {name}, a {type(module).__name__}, has "
                f"{', '.join(left)} and {what}; {remedy}, or build the model with memory"
            )


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """How a module fills itself, if it says so."""
    reset: Callable[[], object] | None = getattr(module, "reset_parameters", None)
    return reset or getattr(module, "_reset_parameters", None)


def _own(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers."""
    slots = (*module._parameters.items(), *module._buffers.items())
    return {slot: tensor for slot, tensor in slots if tensor is not None}


def _and_around(name: str) -> Iterator[str]:
    """The name of a module, and those of all modules that it is in."""
    steps = name.split(".")
    return (".".join(steps[:end]) for end in range(1, len(steps) + 1))


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Seed torch's generator of the CPU, and put it back afterwards."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def tie(projection: nn.Linear, tokens: nn.Embedding | None, seed: int) -> None:
    """Give the head's projection the weight of the token embedding: that very one, or equal numbers where it is far."""
    if tokens is not None:
        projection.weight = tokens.weight
    else:
        fill_normal(projection.weight, TIED_WEIGHTS[0], seed, STANDARD_DEVIATION)


def fill_linear(linear: nn.Linear, name: str, seed: int, standard_deviation: float) -> None:
    """Draw the weight of the linear map called `name` and zero its bias, where it has one."""
    fill_normal(linear.weight, f"{name}.weight", seed, standard_deviation)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def fill_normal(parameter: Tensor, name: str, seed: int, standard_deviation: float) -> None:
    """Draw the parameter called `name` from its own generator."""
    generator = torch.Generator(device="cpu").manual_seed(derive_seed(seed, name))
    drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    drawn.normal_(0.0, standard_deviation, generator=generator)
    with torch.no_grad():
        parameter.copy_(drawn)
