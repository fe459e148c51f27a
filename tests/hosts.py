"""Hosts that are none: network namespaces of this machine, each with a name and an address, connected by links.

A host has its own network, host name and /etc/hosts, and its own /dev/shm; it shares processes and files with this
machine, as hosts with a common folder do. Each is connected to a router, which is a namespace too. All of it ends
with the processes that hold the namespaces, which end when their standard input does: nothing is left behind, not even
where the tests are killed.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from runs import Run

NAMES: Final = ("first", "second", "third")
# Nobody has addresses in this network: it is reserved for examples (RFC 5737).
_NETWORK: Final = "198.51.100"
_RELAY: Final = Path(__file__).parent / "relay.py"


class NotPermittedError(Exception):
    """This machine cannot be divided; the message says why."""


class Namespace:
    """A host, for as long as a process holds it.

    Args:
        name: of the host.
        hosts: the file that is its /etc/hosts.
    """

    def __init__(self, name: str, hosts: Path) -> None:
        setup = (
            f"hostname {name} && mount --bind {hosts} /etc/hosts && mount -t tmpfs none /dev/shm && "
            "echo 1 > /proc/sys/net/ipv4/ip_forward && ip link set lo up && echo ready && exec cat"
        )
        try:
            self._holder = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "sh", "-c", setup],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for the tests
            )
        except OSError as error:
            raise NotPermittedError(f"unshare: {error.strerror}") from error
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            _, err = self._holder.communicate()
            raise NotPermittedError(err.strip())

    @property
    def pid(self) -> int:
        """The process that holds it."""
        return self._holder.pid

    @property
    def entering(self) -> str:
        """What to put before a command that is to run there."""
        return f"nsenter --target {self.pid} --net --uts --mount --wd={os.getcwd()} --"

    def run(self, command: str) -> str:
        """Run a command there, and return what it prints."""
        done = subprocess.run([*self.entering.split(), *command.split()], capture_output=True, text=True)
        if done.returncode:
            raise NotPermittedError(f"{command}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """Let go of it: the kernel removes it, with its ends of links, when no process is in it any more."""
        self._holder.communicate()


class Link:
    """What connects a host with the router: two networks of two addresses each.

    Args:
        router, host: its ends.
        index: of the host.
        delay: seconds by which it holds back what passes, in each direction.
    """

    def __init__(self, router: Namespace, host: Namespace, index: int, delay: float) -> None:
        self._router, self._port = router, f"port{index}"
        self._relay: Run | None = None
        router.run(f"ip link add {self._port} type veth peer name eth0 netns {host.pid}")
        gate = self._port
        if delay:
            gate = f"gate{index}"
            router.run(f"ip link add {gate} type veth peer name inner{index}")
            host.run(f"{sys.executable} {_RELAY} plain eth0")
            router.run(f"{sys.executable} {_RELAY} plain {gate}")
            for device in (self._port, f"inner{index}"):
                router.run(f"ip link set {device} up")
            self._relay = Run(f"{router.entering} python {_RELAY} {delay} {self._port} inner{index}")
            self._relay.wait_until(lambda: self._relay is None or self._relay.out)
        router.run(f"ip address add {_NETWORK}.{4 * index + 1}/30 dev {gate}")
        router.run(f"ip link set {gate} up")
        host.run(f"ip address add {address(index)}/30 dev eth0")
        host.run("ip link set eth0 up")
        host.run(f"ip route add default via {_NETWORK}.{4 * index + 1}")

    def cut(self) -> None:
        """From now on nothing passes."""
        self._router.run(f"ip link set {self._port} down")

    def mend(self) -> None:
        """Let everything pass again."""
        self._router.run(f"ip link set {self._port} up")

    def close(self) -> None:
        """End what holds back."""
        if self._relay is not None:
            self._relay.end()


class Hosts:
    """Context with some hosts.

    Args:
        folder: for their /etc/hosts.
        num_hosts: how many, at most three.
        delays: of their links; none where left out.

    Raises:
        NotPermittedError: this machine cannot be divided.
    """

    def __init__(self, folder: Path, num_hosts: int, delays: Sequence[float] = ()) -> None:
        self.hosts: list[Namespace] = []
        self.links: list[Link] = []
        self._delays = [*delays, *[0.0] * (num_hosts - len(delays))]
        self._file = folder / "hosts"
        self._router: Namespace | None = None
        self._runs: list[Run] = []

    def run(self, index: int, command: str, **variables: str) -> Run:
        """Run a command line on a host, as someone would who is logged in there."""
        run = Run(f"{self.hosts[index].entering} {command}", **variables)
        self._runs.append(run)
        return run

    def __enter__(self) -> "Hosts":
        known = [f"{address(index)} {NAMES[index]}\n" for index in range(len(self._delays))]
        self._file.write_text("".join(["127.0.0.1 localhost\n", *known]))
        try:
            self._router = Namespace("router", self._file)
            for index, delay in enumerate(self._delays):
                self.hosts.append(Namespace(NAMES[index], self._file))
                self.links.append(Link(self._router, self.hosts[index], index, delay))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._runs:
            run.end()
        for link in self.links:
            link.close()
        for host in self.hosts:
            host.close()
        if self._router is not None:
            self._router.close()


def address(index: int) -> str:
    """Of a host: of four in a row the third, where the second is the router's."""
    return f"{_NETWORK}.{4 * index + 2}"
