"""Timeout: for how long a rank may keep the others waiting."""

from stagewright.engine.transport.collective import CollectiveGroup
from stagewright.engine.transport.contract import Transport
from stagewright.engine.transport.group import Group


def watch(transport: Transport, group: Group, timeout: float | None) -> None:
    """Let the ranks of a pipeline know each other by name, and hold one for silent after so many seconds.

    Raises:
        ValueError: the time-out is no time.
    """
    if group.size > 1:
        transport.progress.replica = f" of replica {group.rank}"
    if isinstance(group, CollectiveGroup):
        group.progress = transport.progress
    if timeout is None:
        return
    if not timeout > 0:
        raise ValueError(f"timeout is a number of seconds above 0: got {timeout!r}; leave it out for half an hour")
    transport.set_timeout(timeout)
