"""How the next token is chosen among those that the model holds for possible."""

import math

import torch
from torch import Tensor


class Sampler:
    """Draws tokens of one text with random numbers of its own.

    The probabilities are softmax(logits / temperature): 1 takes the model at its word, less sharpens, and 0 leaves the
    likeliest token alone. The same seed and logits give the same tokens on every machine and device; torch's global
    random state is untouched.
    """

    def __init__(self, temperature: float, seed: int) -> None:
        if not 0.0 <= temperature < math.inf:
            raise ValueError(
                f"a temperature is a number from 0 up: got {temperature}; pass 1 to sample as the model "
                f"predicts, 0 to take the likeliest token"
            )
        self.temperature = temperature
        self._generator = torch.Generator(device="cpu").manual_seed(seed)

    def draw(self, logits: Tensor) -> int:
        """Draw the next token from its logits, [vocab].

        Gumbel noise is added and the greatest sum taken, which draws from the softmax (Maddison, Tarlow, Minka: "A*
        Sampling", 2014). Unlike a search in the cumulated probabilities, it does not let the rounding of one logit
        move the borders of all tokens behind it: runs that differ in their last bits hardly ever draw another text.
        """
        logits = logits.double().cpu()
        if self.temperature > 0:
            uniform = torch.rand(logits.shape, generator=self._generator, dtype=torch.float64)
            logits = logits - self.temperature * torch.log(-torch.log(uniform))
        return int(logits.argmax())
