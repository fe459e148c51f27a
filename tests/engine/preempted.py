"""Steps that all ranks make until one of them gets the signal that its machine is taken away."""

import os
import signal

from stagewright.engine import Preemption, RankContext


def steps_until_told(context: RankContext, told: int, at: int) -> list[int]:
    """Make steps until all end; one rank gets the signal. Twice, for a second training begins anew."""
    counted = []
    for _ in range(2):
        before = signal.getsignal(signal.SIGTERM)
        with Preemption(context.transport) as preemption:
            for step in range(1, 100):
                context.transport.gather(b"")  # like a step, in which all wait for all
                if context.rank == told and step == at:
                    os.kill(os.getpid(), signal.SIGTERM)
                context.transport.gather(b"")
                if preemption.ends_after(step):
                    break
        assert signal.getsignal(signal.SIGTERM) is before
        counted.append(step)
    return counted
