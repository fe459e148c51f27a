"""Mail: activations and gradients between the instruction that makes them and the one that needs them."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from stagewright.engine.channels import channels_of
from stagewright.engine.transport.contract import Channel, Kind, Receipt, Transport
from stagewright.engine.value import Layout, Packed
from stagewright.schedules import Program

# (whether it is an activation, the stage that needs it, its microbatch)
Address: TypeAlias = tuple[bool, int, int]


class Mail:
    """One rank's letters, each under the address of the stage that needs it.

    Args:
        program: says where each stage of each microbatch lives.
        transport: takes what goes to another rank; a stage on the same rank gets the very tensors.
    """

    def __init__(self, program: Program, transport: Transport) -> None:
        self._rank_of = program.placement.rank_of
        self._transport = transport
        self._channels = channels_of(program)
        transport.open(tuple(self._channels.values()))
        self.later = 0  # by how much the addresses that were bound are lower than the real ones
        self.layouts: dict[tuple[bool, int], Layout] = {}  # of the last message to each stage
        self._inbox: dict[Address, Receipt | Packed] = {}
        self._outbox: dict[Address, Packed] = {}

    def put(self, address: Address, packed: Packed) -> None:
        """Lay down what a stage made: for a stage here at once, for another rank until its SEND."""
        here = self._rank_of(address[1], address[2]) == self._transport.rank
        (self._inbox if here else self._outbox)[address] = packed

    def take(self, address: Address) -> Packed:
        """What a stage needs; waits until it has arrived."""
        letter = self._inbox.pop(address)
        return letter if isinstance(letter, Packed) else letter.wait()

    def sender(self, address: Address) -> Callable[[], None]:
        """The SEND of one letter, bound to its channel."""
        forward, stage, microbatch = address
        channel = self._channels[self._transport.rank, self._rank_of(stage, microbatch), _kind(forward)]
        return partial(self._send, address, channel)

    def receiver(self, address: Address) -> Callable[[], None]:
        """The RECV of one letter, bound to its channel."""
        forward, stage, microbatch = address
        neighbour = stage - 1 if forward else stage + 1
        channel = self._channels[self._rank_of(neighbour, microbatch), self._transport.rank, _kind(forward)]
        return partial(self._receive, address, channel)

    @property
    def is_empty(self) -> bool:
        """Whether everything that was made has been used."""
        return not self._inbox and not self._outbox

    def clear(self) -> None:
        """Throw everything away, after a failure."""
        self._inbox.clear()
        self._outbox.clear()

    def _send(self, bound: Address, channel: Channel) -> None:
        address = (bound[0], bound[1], bound[2] + self.later)
        packed = self._outbox.pop(address)
        self.layouts[bound[:2]] = packed.layout
        self._transport.send(channel, packed, address[1], address[2])

    def _receive(self, bound: Address, channel: Channel) -> None:
        address = (bound[0], bound[1], bound[2] + self.later)
        self._inbox[address] = self._transport.post(channel, address[1], address[2])


def _kind(forward: bool) -> Kind:
    return "activation" if forward else "gradient"
