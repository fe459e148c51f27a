"""Everyone: what all ranks of a pipeline, and of all its replicas, say to each other."""

import json
from collections.abc import Sequence

from stagewright.engine.transport.contract import Transport
from stagewright.engine.transport.group import Group, gather_bytes


def gather_texts(transport: Transport, group: Group, own: str) -> dict[str, str]:
    """What every rank says, those of all replicas too, by the name of the rank; all of them call this alike."""
    texts = [data.decode() for data in transport.gather(own.encode())]
    if group.size == 1:
        return {f"rank {rank}": text for rank, text in enumerate(texts)}
    of_replicas = [json.loads(data) for data in gather_bytes(group, json.dumps(texts).encode())]
    return {
        f"rank {rank} of replica {replica}": text
        for replica, texts in enumerate(of_replicas)
        for rank, text in enumerate(texts)
    }


def listed(ranks: Sequence[str]) -> str:
    """Names of ranks in a sentence."""
    *some, last = ranks
    if some and all(rank.removeprefix("rank ").isdecimal() for rank in ranks):
        return f"ranks {', '.join(rank.removeprefix('rank ') for rank in some)} and {last.removeprefix('rank ')}"
    return f"{', '.join(some)} and {last}" if some else last
