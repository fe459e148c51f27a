"""What several tests of the command share."""

from collections.abc import Iterator

import pytest
from runs import Run


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    """Whatever a test starts."""
    started: list[Run] = []
    yield started
    for run in started:
        run.end()
