"""A wire that is long: passes frames between two devices, each some time after it came, for kernels without netem.

`python relay.py SECONDS ONE OTHER`; `python relay.py plain DEVICE…` has checksums made by the kernel, and not left to
devices, which these are not.
"""

import array
import fcntl
import select
import socket
import struct
import sys
import time
from collections import deque
from typing import Final

_ALL_PROTOCOLS: Final = 3
_SOL_PACKET: Final = 263  # <linux/socket.h>
_IGNORE_OUTGOING: Final = 23  # <linux/if_packet.h>
_SIOCETHTOOL: Final = 0x8946
_SET_CHECKSUMS: Final = 0x17  # <linux/ethtool.h>: of what is sent


def open_device(name: str) -> socket.socket:
    """A socket for all frames that come in by a device, and for frames to go out by it."""
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    device.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    device.bind((name, 0))
    return device


def relay(delay: float, one: str, other: str) -> None:
    """Pass frames for as long as the process lives."""
    first, second = open_device(one), open_device(other)
    peer = {first: second, second: first}
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        patience = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for device in select.select([first, second], [], [], patience)[0]:
            under_way.append((time.monotonic() + delay, peer[device], device.recv(1 << 16)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, device, frame = under_way.popleft()
            device.send(frame)


def make_plain(name: str) -> None:
    """Leave no checksums to a device."""
    order = array.array("B", struct.pack("II", _SET_CHECKSUMS, 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCETHTOOL, struct.pack("16sP", name.encode(), order.buffer_info()[0]))


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        for device in sys.argv[2:]:
            make_plain(device)
    else:
        relay(float(sys.argv[1]), *sys.argv[2:])
