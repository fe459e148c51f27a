"""A watch over what readers do: nothing that they read may be executed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

# The interpreter's own words for running code, or another program, and for looking for code to run.
EXECUTION: Final = frozenset(
    {"exec", "compile", "import", "marshal.loads", "pickle.find_class", "os.exec", "os.fork", "os.posix_spawn"}
    | {"os.system", "subprocess.Popen", "ctypes.dlopen"}
)


class Executed(BaseException):
    """Something was run; no ``except Exception`` of a reader takes it for a refusal."""


class Watch:
    """Raises Executed where something is run while it is on."""

    def __init__(self) -> None:
        self._is_on = False
        sys.addaudithook(self._note)

    @contextmanager
    def on(self) -> Iterator[None]:
        """A block in which nothing is executed."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_on and event in EXECUTION:
            self._is_on = False
            raise Executed(f"{event}{arguments!r:.200}")
