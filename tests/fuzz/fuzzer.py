"""A coverage-guided fuzzer of one reader: ``python fuzzer.py NAME CORPUS CRASHERS SECONDS SEED``.

It changes what the reader takes, keeps what reaches new code of ours, and goes on from there. Anything that comes out
but a ValueError, anything executed, anything that takes 10 s or 2 GB ends it with a nonzero exit code, and the bytes
that did it are left in CRASHERS.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import atheris

TESTS = Path(__file__).parent.parent
sys.path.extend(str(TESTS / folder) for folder in ("engine", "fuzz"))

import torch  # noqa: E402  # not to be instrumented

with atheris.instrument_imports(include=["stagewright"]):
    from readers import Reader, json_places, parsed, readers
from watch import Watch  # noqa: E402

# What stands for any value of JSON.
JUNK: Any = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**40,
    0.5,
    -1e300,
    "",
    "0F0",
    "\ud800",
    [],
    {},
    [[]],
    {"tensor": "x"},
)
SHARE_OF_BYTES = 0.3  # of the changes, where the format is JSON


class Target:
    """One reader under attack.

    Args:
        reader: it.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        for seed in reader.seeds:
            assert reader.accepts(seed)  # imports what it imports late
        self._watch = Watch()

    def read(self, data: bytes) -> None:
        """Read it, and let nothing pass but a refusal."""
        with self._watch.on():
            self._reader.accepts(data)

    def change(self, data: bytes, max_size: int, seed: int) -> bytes:
        """Change bytes; or of JSON a value, to another one from anywhere in it, to junk, or to a slightly other one."""
        chosen = random.Random(seed)
        document = parsed(data) if self._reader.is_json and chosen.random() > SHARE_OF_BYTES else None
        places = json_places(document)
        if not places:
            return bytes(atheris.Mutate(data, max_size))
        container: Any
        container, key = chosen.choice(places)
        match chosen.randrange(5), container[key]:
            case 0, _:
                other: Any = chosen.choice(places)
                container[key] = json.loads(json.dumps(other[0][other[1]]))
            case 1, str() as text:
                container[key] = atheris.Mutate(text.encode("utf-8", "replace"), 64).decode("utf-8", "replace")
            case 2, int() | float() as number:
                container[key] = number + chosen.choice((-1, 1, 0.5, -number, number))
            case 3, _:
                del container[key]
            case _:
                container[key] = chosen.choice(JUNK)
        changed = json.dumps(document).encode()
        return changed if len(changed) <= max_size else data


def main() -> None:
    name, corpus, crashers, seconds, seed = sys.argv[1:]
    torch.set_num_threads(1)
    target = Target(readers()[name])
    options = [f"-max_total_time={seconds}", f"-seed={seed}", f"-artifact_prefix={crashers}/", "-timeout=10"]
    options += ["-rss_limit_mb=2048", "-max_len=20000", "-len_control=0", "-print_final_stats=1", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, corpus], target.read, custom_mutator=target.change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
