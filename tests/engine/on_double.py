"""A pytest plugin (``-p on_double``): whatever runs on threads runs on the double of NCCL instead."""

from weakref import WeakKeyDictionary

import pytest
from nccl_double import Switchboard

from stagewright.engine.transport.device import DeviceTransport
from stagewright.engine.transport.threads import Hub, ThreadTransport


class DoubledTransports:
    """Stands in for ``ThreadTransport``: connects the ranks of a hub by communicators."""

    def __init__(self) -> None:
        self._boards: WeakKeyDictionary[Hub, Switchboard] = WeakKeyDictionary()

    def __call__(self, hub: Hub, rank: int) -> DeviceTransport:
        board = self._boards.setdefault(hub, Switchboard(hub))
        host = ThreadTransport(hub, rank)
        return DeviceTransport(host, board.connector(rank), host.device)


@pytest.fixture(autouse=True)
def threads_are_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every test."""
    monkeypatch.setattr("stagewright.engine.launch.ThreadTransport", DoubledTransports())
