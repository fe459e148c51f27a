"""Text from the trained model: every prompt is a microbatch, and grows by one byte with every forward pass.

Only the rank with the last stage knows what comes next, and the first stage is the one to read it; so the ranks tell
each other. The keys and values of what was read stay on the ranks that computed them.
"""

from collections.abc import Sequence

import torch

from stagewright.engine import PerMicrobatch, Pipeline, RankContext
from stagewright.models import KeyValueCache, Sampler, derive_seed


def continue_prompts(
    pipe: Pipeline,
    context: RankContext,
    prompts: Sequence[bytes],
    num_bytes: int,
    *,
    sequence: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> tuple[bytes, ...]:
    """Sample the `num_bytes` bytes that follow on each prompt. All ranks call this alike, and all get the same.

    A prompt has at least one byte, and random numbers of its own, from the seed and its place among the prompts. What
    is sampled depends on nothing else: not on the schedule, the number of ranks, or the other prompts.

    `sequence` is the number of positions that the model has. Where a text has used them all up, its positions are
    counted anew from a later byte (see `first_byte_read`), and caches begin again.
    """
    if not prompts:
        return ()
    samplers = [Sampler(temperature, derive_seed(seed, f"prompt.{index}")) for index in range(len(prompts))]
    texts = [bytearray(prompt) for prompt in prompts]
    caches = [KeyValueCache() for _ in prompts]
    lengths = [len(prompt) for prompt in prompts]
    first = num_read = 0
    for length in range(min(lengths), max(lengths) + num_bytes):
        if first_byte_read(length, sequence) != first:
            first = num_read = first_byte_read(length, sequence)
            caches = [KeyValueCache() for _ in prompts]
        tokens = torch.tensor([list(text[num_read:length]) for text in texts], device=context.device)
        logits = pipe.predict(tokens, num_microbatches=len(texts), cache=PerMicrobatch(caches))
        num_read = length
        # Longer prompts know their next byte already: they only read until it is their turn.
        growing = [index for index, text in enumerate(texts) if len(text) == length]
        drawn = b"" if logits is None else bytes(samplers[index].draw(logits[index, -1]) for index in growing)
        for index, byte in zip(growing, next(filter(None, context.transport.gather(drawn)))):
            texts[index].append(byte)
    return tuple(bytes(text[start : start + num_bytes]) for text, start in zip(texts, lengths))


def first_byte_read(length: int, sequence: int) -> int:
    """Where the model begins to read a text of some length, so that the rest of it fits its positions.

    That is at the beginning while it can, and then half a sequence further on whenever the end does not fit: positions
    are learned, each from 0, so a cache cannot slide on by a byte, and read anew must be everything that is kept.
    """
    half = (sequence + 1) // 2
    num_halves = -(-(length - sequence) // half)
    return max(num_halves, 0) * half
