"""What a rank reports: its error as it was, where that can be, else one that says the same."""

import pickle
import threading
import traceback
from typing import Any

import pytest
import torch.distributed as dist

from stagewright.engine import PeerError, RankError
from stagewright.engine.launch.processes import _as_error
from stagewright.engine.launch.rank_process import failure_of, is_consequence


def brought_back(error: BaseException) -> BaseException:
    """An error after its way to the launcher."""
    try:
        raise error
    except BaseException as raised:
        failure = pickle.loads(pickle.dumps(failure_of(raised)))
    return _as_error(3, failure)


class Changes(Exception):  # noqa: N818
    """Changes what it says when it is made again from what it says."""

    def __init__(self, message: str) -> None:
        super().__init__(f"twice {message}")


class NeedsTwo(Exception):  # noqa: N818
    """Cannot be made again from its message."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class HasLock(Exception):  # noqa: N818
    """Cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Speechless(Exception):  # noqa: N818
    """Raises when it is asked for its message."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class HasData(ValueError):  # noqa: N818
    """An ordinary error with something of its own."""

    def __init__(self, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.data = data


@pytest.mark.parametrize(
    "error", [ValueError("bad"), KeyError("key"), OSError(5, "disk"), RuntimeError(), HasData("x", 7)]
)
def test_an_ordinary_error_comes_as_it_was(error: Exception) -> None:
    error.add_note("rank 3 failed at 1F2")
    back = brought_back(error)
    assert type(back) is type(error)
    assert (str(back), back.args, back.__notes__) == (str(error), error.args, ["rank 3 failed at 1F2"])
    assert getattr(back, "data", None) == getattr(error, "data", None)
    assert back.__cause__ is None
    assert traceback.extract_tb(back.__traceback__)[-1].line == "raise error"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Changes("said"), "Changes: twice said"),
        (NeedsTwo(1, 2), "NeedsTwo: 1 and 2"),
        (HasLock("held"), "HasLock: held"),
        (HasData("held", threading.Lock()), "HasData: held"),
        (Speechless(), "Speechless: <its message cannot be made: RuntimeError>"),
        (SystemExit(2), "SystemExit: 2"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
    ],
)
def test_what_cannot_come_as_it_was_is_told(error: BaseException, message: str) -> None:
    error.add_note("rank 3 failed at 1F2")
    back = brought_back(error)
    assert type(back) is RankError
    assert str(back) == message
    assert back.__notes__ == ["rank 3 failed at 1F2"]
    assert traceback.extract_tb(back.__traceback__)[-1].line == "raise error"


def test_the_causes_of_an_error_are_in_its_traceback() -> None:
    error = ValueError("outer")
    error.__cause__ = KeyError("inner")
    assert "KeyError: 'inner'" in str(brought_back(error).__cause__)


@pytest.mark.parametrize(
    "error",
    [
        PeerError("rank 1 has gone"),
        dist.DistNetworkError("recvValue failed"),
        dist.DistBackendError("NCCL error"),
        RuntimeError("[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/buffer.cc:72] Timed out waiting 1800000ms for send"),
        RuntimeError("[enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:83] ifa != nullptr"),
    ],
)
def test_what_a_rank_suffers_from_another_is_told_apart(error: Exception) -> None:
    assert is_consequence(error)


@pytest.mark.parametrize("error", [RuntimeError("gloomy"), ValueError("/gloo/"), RankError("/gloo/"), OSError(5, "x")])
def test_a_rank_s_own_error_is_no_consequence(error: Exception) -> None:
    assert not is_consequence(error)
