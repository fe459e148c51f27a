"""Neighbourhood: finds the ranks of a process group that are on this host, and connects to them."""

import os
import secrets
import socket
import struct
from typing import Final

import torch.distributed as dist

from stagewright.engine.control.notes import exchange_notes, this_host
from stagewright.engine.errors import PeerError
from stagewright.engine.transport.neighbour import Neighbour

_HELLO: Final = struct.Struct("<I32s")
_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid
_SECONDS: Final = 60.0  # for a rank that listens to be reached


def connect_neighbours(group: dist.ProcessGroup, number: int) -> dict[int, Neighbour]:
    """Connect to every other rank of a group that runs on this host, as the same user; all ranks call this alike.

    Two ranks are on one host if they have one kernel and one network, for there only one can hear the other listen:
    containers and network namespaces count as hosts of their own.

    Args:
        group: of processes.
        number: tells this call from others of the same group.

    Raises:
        PeerError: a rank has gone meanwhile.
    """
    rank, num_ranks = group.rank(), group.size()
    name, token, host = secrets.token_hex(16), secrets.token_bytes(32), this_host("net")
    listener = _listen(name, num_ranks) if host else None
    try:
        told = exchange_notes(group, f"neighbourhood {number}", f"{host}/{name}/{token.hex()}")
        notes = {other: note.split("/") for other, note in enumerate(told) if other != rank}
        near = {other: rest for other, (its_host, *rest) in notes.items() if host and its_host == host}
        connections = {other: _call(rank, *near[other]) for other in near if other < rank}
        while listener is not None and len(connections) < len(near):
            connections.update(_answer(listener, token))
        return {other: Neighbour(other, connections[other]) for other in sorted(connections)}
    except OSError as error:
        raise PeerError(f"a rank on this host has gone before all were connected ({error})") from error
    finally:
        if listener is not None:
            listener.close()


def _listen(name: str, num_ranks: int) -> socket.socket:
    """Wait for others under a name that is no file's, and ends with the socket."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0stagewright {name}")
    listener.listen(num_ranks)
    listener.settimeout(_SECONDS)
    return listener


def _call(rank: int, name: str, token: str) -> socket.socket:
    """Connect to a rank that listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0stagewright {name}")
    connection.send(_HELLO.pack(rank, bytes.fromhex(token)))
    return connection


def _answer(listener: socket.socket, token: bytes) -> dict[int, socket.socket]:
    """The next rank that connects; nothing if that is somebody else."""
    connection, _ = listener.accept()
    connection.settimeout(_SECONDS)
    hello = connection.recv(_HELLO.size)
    connection.settimeout(None)
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if len(hello) == _HELLO.size and user == os.getuid():
        rank, its_token = _HELLO.unpack(hello)
        if secrets.compare_digest(its_token, token):
            return {int(rank): connection}
    connection.close()
    return {}
