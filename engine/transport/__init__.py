"""Transports: what connects the ranks, all behind one small contract."""

from stagewright.engine.transport.contract import Channel, Receipt, Transport
from stagewright.engine.transport.gloo import GlooTransport
from stagewright.engine.transport.hub import Hub
from stagewright.engine.transport.threads import ThreadTransport

__all__ = ["Channel", "GlooTransport", "Hub", "Receipt", "ThreadTransport", "Transport"]
