"""The order in which text is read: a pure function of seed and step, so that it can be taken up again anywhere."""

import hashlib

import torch
from torch import Tensor


class Batches:
    """Batches of next-byte prediction from one text.

    The text is cut into windows of `sequence_length` bytes that do not overlap; every epoch visits each of them once,
    in a new order. `batch(step)` depends on the seed and the step alone, never on the calls before it.
    """

    def __init__(self, data: bytes, sequence_length: int, batch_size: int, seed: int) -> None:
        for name, value in (("sequence length", sequence_length), ("batch size", batch_size)):
            if value < 1:
                raise ValueError(f"the {name} must be at least 1: got {value}")
        if len(data) <= sequence_length:
            raise ValueError(
                f"{len(data)} bytes are too short for a sequence of {sequence_length}: "
                f"one window takes {sequence_length + 1}; give more text or a shorter sequence"
            )
        # The copy is what makes the buffer writable, which torch asks for.
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.seed = seed
        self._epoch, self._permutation = 0, self._shuffled(0)

    @property
    def num_windows(self) -> int:
        """How many windows one epoch has. The last byte only ever is a target."""
        return (len(self.data) - 1) // self.sequence_length

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of a step (from 0): two int64 tensors, [batch_size, sequence_length]."""
        first = step * self.batch_size
        starts = torch.tensor([self._window(first + row) for row in range(self.batch_size)]) * self.sequence_length
        positions = starts[:, None] + torch.arange(self.sequence_length)
        return self.data[positions].long(), self.data[positions + 1].long()

    def _window(self, position: int) -> int:
        """Look up the window that comes at a position of the endless sequence of epochs."""
        epoch, offset = divmod(position, self.num_windows)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, self._shuffled(epoch)
        return int(self._permutation[offset])

    def _shuffled(self, epoch: int) -> Tensor:
        digest = hashlib.sha256(f"{self.seed} {epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
        return torch.randperm(self.num_windows, generator=generator)
