"""Notes: what every process of a group tells the others over the store at which they met, before they are connected."""

import os
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch.distributed as dist

from stagewright.engine.errors import PeerError

_LOOK: Final = timedelta(seconds=0.5)


def exchange_notes(group: dist.ProcessGroup, name: str, own: str) -> list[str]:
    """Every rank's note, in the order of ranks; all ranks call this alike.

    Args:
        group: of processes.
        name: of these notes, used once.
        own: this rank's.

    Raises:
        PeerError: whoever keeps the store has gone.
    """
    store = group.get_group_store()
    keys = [f"stagewright {name} of rank {rank}" for rank in range(group.size())]
    try:
        store.set(keys[group.rank()], own)
        for key in keys:
            while not store.check([key]):
                with suppress(dist.DistStoreError):  # so that Ctrl-C is heard in between
                    store.wait([key], _LOOK)
        return [store.get(key).decode() for key in keys]
    except RuntimeError as error:
        raise PeerError(f"whoever keeps the store has gone before all ranks were connected ({error})") from error


def this_host(*namespaces: str) -> str:
    """What processes of one user on one host have in common; nothing where that is not known.

    Args:
        namespaces: kinds of them, such as ``net``, which must be the same too: containers count as hosts of their own.
    """
    if not sys.platform.startswith("linux"):
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in namespaces]
    return "-".join(map(str, (boot, *spaces, os.getuid())))
