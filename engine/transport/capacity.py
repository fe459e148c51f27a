"""Capacity: how large the receives of a channel are, known to both its ends without a word."""

from stagewright.engine.transport.frame import FIRST_CAPACITY


class Capacity:
    """The sizes of one channel's receives, as either end works them out.

    A gloo receive smaller than its message aborts the process, so the sender must know the size of the k-th receive.
    When that is posted, both ends have seen all frames of this run up to the (k - depth)-th (see Channel): it is as
    large as the largest of those. What earlier runs sent counts too, half as much with every further run, so that one
    large batch does not make all later receives large.
    """

    def __init__(self) -> None:
        self._settled = FIRST_CAPACITY
        self._largest = 0
        self._unsettled: dict[int, int] = {}
        self._num_settled = 0

    def of(self, index: int, depth: int) -> int:
        """Bytes of the index-th receive of this run."""
        while self._num_settled <= index - depth:
            self._settled = max(self._settled, self._unsettled.pop(self._num_settled))
            self._num_settled += 1
        return self._settled

    def saw(self, index: int, num_bytes: int) -> None:
        """Note the size of the index-th frame."""
        self._unsettled[index] = num_bytes
        self._largest = max(self._largest, num_bytes)

    def begin(self) -> None:
        """A run begins; all frames of the last one are known to both ends."""
        if self._largest:
            self._settled = max(FIRST_CAPACITY, self._largest, self._settled // 2)
        self._largest = 0
        self._unsettled.clear()
        self._num_settled = 0
