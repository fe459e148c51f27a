"""Links: connections between all ranks of a pipeline beside those that carry its data."""

import json
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

import torch.distributed as dist

from stagewright.engine.control.notes import exchange_notes, this_host
from stagewright.engine.control.progress import Place, Progress, open_page, read_place

_LOOPBACK: Final = "127.0.0.1"
_HELLO: Final = struct.Struct("<I32s")
# For a rank to be reached; one that cannot be is not watched, and all else goes on.
_SECONDS: Final = 20.0
# kind, number of bytes
_HEADER: Final = struct.Struct("<BI")
_LONGEST: Final = 1 << 16


@dataclass
class Link:
    """The connection to one other rank.

    Args:
        rank: it.
        connection: a stream.
        page: its progress, where it runs on this host.
        death: is readable from when its process has ended, where that can be known.
    """

    rank: int
    connection: socket.socket
    page: int | None = None
    death: int | None = None
    told: Place = field(default_factory=Place)  # where it has said it is
    left: str | None = None  # what it has said when it left in good order
    is_open: bool = True
    _received: bytearray = field(default_factory=bytearray)
    _is_clogged: bool = False

    @property
    def place(self) -> Place:
        """Where the rank is, or was last."""
        return self.told if self.page is None else read_place(self.page)

    def send(self, kind: int, text: str = "") -> None:
        """Send a message; whoever does not read loses what does not fit into the buffer."""
        data = text.encode(errors="replace")[: _LONGEST - _HEADER.size]
        data = _HEADER.pack(kind, len(data)) + data
        if self.is_open and not self._is_clogged:
            with suppress(OSError):
                self._is_clogged = True
                self._is_clogged = self.connection.send(data, socket.MSG_DONTWAIT) < len(data)

    def receive(self) -> list[tuple[int, str]]:
        """All messages that have come, as kind and text; the link is closed at their end, if it has come to that."""
        while self.is_open:
            try:
                data = self.connection.recv(_LONGEST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._received += data
            self.is_open = bool(data)
        messages = []
        while len(self._received) >= _HEADER.size:
            kind, size = _HEADER.unpack_from(self._received)
            if size > _LONGEST:
                self.is_open = False  # this is none of us
                break
            if len(self._received) < _HEADER.size + size:
                break
            messages.append((kind, self._received[_HEADER.size : _HEADER.size + size].decode(errors="replace")))
            del self._received[: _HEADER.size + size]
        return messages

    def close(self) -> None:
        """Hang up; what was sent still arrives."""
        self.is_open = False
        self.connection.close()
        for file in (self.page, self.death):
            if file is not None:
                os.close(file)
        self.page = self.death = None


def connect_links(group: dist.ProcessGroup, number: int, progress: Progress) -> list[Link]:
    """Connect to every other rank of a group; all ranks call this alike.

    Args:
        group: of processes.
        number: tells this call from others of the same group.
        progress: of this rank.

    Raises:
        PeerError: a rank, or whoever keeps the store, has gone before all ranks were there.
    """
    rank, num_ranks = group.rank(), group.size()
    hosts = exchange_notes(group, f"host {number}", this_host("net", "pid"))
    is_local = bool(hosts[rank]) and len(set(hosts)) == 1
    addresses = [_LOOPBACK] if is_local else _addresses(group.get_group_store())
    token = secrets.token_hex(32)
    with socket.create_server((_LOOPBACK if is_local else "", 0), backlog=num_ranks) as listener:
        port = listener.getsockname()[1]
        own = json.dumps([addresses, port, token, os.getpid(), progress.file, progress.token.hex()])
        told = exchange_notes(group, f"link {number}", own)
        there: Mapping[int, list[Any]] = {other: json.loads(text) for other, text in enumerate(told) if other != rank}
        deadline = monotonic() + _SECONDS
        connections = {other: _call(rank, *there[other][:3]) for other in there if other < rank}
        while (missing := len(there) - len(connections)) and (left := deadline - monotonic()) > 0:
            assert missing > 0, "every rank calls once"
            connections.update(_answer(listener, bytes.fromhex(token), left))
    return [
        _link(other, connection, there[other], near=bool(hosts[rank]) and hosts[other] == hosts[rank])
        for other, connection in sorted(connections.items())
        if connection is not None
    ]


def _addresses(store: Any) -> list[str]:
    """By what others may reach this host: first that from which it reaches the store, as they do."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    found: dict[str, None] = {}
    with suppress(OSError, AttributeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((store.host, store.port))  # nothing is sent
        found[probe.getsockname()[0]] = None
    with suppress(OSError):
        infos = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
        found |= {str(address[0]): None for *_, address in infos}
    return sorted(found, key=lambda address: address.startswith("127."))


def _call(rank: int, addresses: list[str], port: int, token: str) -> socket.socket | None:
    """Connect to a rank that listens."""
    for address in addresses:
        with suppress(OSError):
            connection = socket.create_connection((address, port), _SECONDS / len(addresses))
            connection.settimeout(None)
            connection.sendall(_HELLO.pack(rank, bytes.fromhex(token)))
            return connection
    return None


def _answer(listener: socket.socket, token: bytes, seconds: float) -> dict[int, socket.socket]:
    """The next rank that connects; nothing if that is somebody else."""
    with suppress(OSError):
        listener.settimeout(seconds)
        connection, _ = listener.accept()
        connection.settimeout(seconds)
        hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        connection.settimeout(None)
        if len(hello) == _HELLO.size and secrets.compare_digest(hello[-len(token) :], token):
            return {int(_HELLO.unpack(hello)[0]): connection}
        connection.close()
    return {}


def _link(rank: int, connection: socket.socket, told: list[Any], *, near: bool) -> Link:
    """A link, with what can be seen of its rank on one host."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, True)
    _, _, _, process, file, token = told
    if not near or file is None:
        return Link(rank, connection)
    link = Link(rank, connection)
    with suppress(OSError, AttributeError):
        link.death = os.pidfd_open(process)
    link.page = open_page(process, file, bytes.fromhex(token))
    if link.page is None and link.death is not None:  # whoever has that number here is another
        os.close(link.death)
        link.death = None
    return link
