"""A save that is killed, at whatever point, leaves the checkpoint before it whole, or is whole itself."""

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest
import torch
from checkpointing import Shape, make_pipeline, make_tokens
from launching import launch_on

from stagewright.engine import Checkpoints, PeerError, Pipeline, RankContext, read_state_dict
from stagewright.engine.checkpoint.files import Files, Part, Written

SHAPE = Shape("1f1b", 1, num_microbatches=1, model={"num_layers": 1, "hidden_size": 2})


class Killed(BaseException):
    """The process is no more."""


class QuickFiles(Files):
    """A disk that is there at once."""

    def sync(self, file: IO[bytes]) -> None:
        file.flush()

    def sync_folder(self, folder: Path) -> None:
        pass


class KilledFiles(QuickFiles):
    """A disk that loses power before its nth operation; what was not yet synced is lost, or half of it.

    Args:
        num_operations: that still succeed.
        loses: whether what was not synced is cut off; a process that is killed leaves it to the system.
    """

    def __init__(self, num_operations: int, *, loses: bool = True) -> None:
        self.left = num_operations
        self.loses = loses
        self.unsynced: set[Path] = set()

    def make_folder(self, folder: Path) -> None:
        self.count()
        super().make_folder(folder)

    def write(self, path: Path, parts: Iterable[Part]) -> Written:
        self.unsynced.add(path)
        return super().write(path, parts)

    def append(self, file: IO[bytes], part: Part) -> None:
        if self.left == 0:
            super().append(file, part[: len(part) // 2])
            file.flush()
        self.count()
        super().append(file, part)

    def sync(self, file: IO[bytes]) -> None:
        self.count()
        super().sync(file)
        self.unsynced.discard(Path(file.name))

    def sync_folder(self, folder: Path) -> None:
        self.count()
        super().sync_folder(folder)

    def rename(self, source: Path, destination: Path) -> None:
        self.count()
        assert source not in self.unsynced, "it may be empty after a crash"
        super().rename(source, destination)

    def remove(self, folder: Path) -> None:
        if self.left == 0:
            next(folder.glob("*.safetensors"), folder / "none").unlink(missing_ok=True)
        self.count()
        super().remove(folder)

    def count(self) -> None:
        if self.left == 0:
            for path in self.unsynced if self.loses else ():
                if path.exists():
                    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            raise Killed
        self.left -= 1


class KilledInWriting(QuickFiles):
    """The process is killed after it has written so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    def append(self, file: IO[bytes], part: Part) -> None:
        super().append(file, part[: self.left])
        if len(part) > self.left:
            file.flush()
            raise Killed
        self.left -= len(part)


class Survival:
    """Two whole checkpoints and a third save, which is killed; in one rank.

    Args:
        context: of the rank.
        folder: for all that is written.
    """

    def __init__(self, context: RankContext, folder: Path) -> None:
        self.folder = folder
        self.pipe, self.resumed = make_pipeline(context, SHAPE), make_pipeline(context, SHAPE)
        self.weights = []
        for step in range(3):
            self.pipe.train_step(*make_tokens(step))
            self.weights.append(self.weight_of(self.pipe).clone())
            if step < 2:
                Checkpoints(folder / "before", self.pipe, keep=2).save()

    def weight_of(self, pipe: Pipeline) -> torch.Tensor:
        return next(pipe.modules[0].parameters()).detach()

    def survives(self, files: QuickFiles) -> int:
        """The step from which a training goes on after the third save; its own save then clears away what was left."""
        folder = self.folder / "after"
        shutil.copytree(self.folder / "before", folder)
        with suppress(Killed):
            Checkpoints(folder, self.pipe, keep=2, files=files).save()
        again = Checkpoints(folder, self.resumed, keep=2, files=QuickFiles())
        step = again.load()
        assert step is not None
        assert torch.equal(self.weight_of(self.resumed), self.weights[step - 1])
        again.save()
        assert len(list(folder.glob("step-*"))) == 2
        assert not list(folder.glob(".*"))
        shutil.rmtree(folder)
        return step


def kill_at_every_operation(context: RankContext, folder: Path, loses: bool) -> list[int]:
    """The steps that survive, from a kill before the first operation on the disk to one after the last."""
    survival = Survival(context, folder)
    steps = []
    for num_operations in range(1000):
        files = KilledFiles(num_operations, loses=loses)
        steps.append(survival.survives(files))
        if files.left:
            break
    return steps


@pytest.mark.parametrize("loses", [False, True], ids=["kill", "power failure"])
def test_a_save_that_is_killed_at_any_point_leaves_a_whole_checkpoint(loses: bool, tmp_path: Path) -> None:
    """The one before until ``latest`` moves, and from then on the new one."""
    [steps] = launch_on("threads", kill_at_every_operation, 1, (tmp_path, loses))
    num_before, num_after = steps.count(2), steps.count(3)
    assert steps == [2] * num_before + [3] * num_after
    assert num_before > 10
    assert num_after > 3


def kill_at_many_bytes(context: RankContext, folder: Path) -> tuple[list[int], int]:
    """The steps that survive, by the byte at which the process is killed, from the first to the last."""
    survival = Survival(context, folder)
    whole = KilledInWriting(1 << 40)
    assert survival.survives(whole) == 3
    num_bytes = (1 << 40) - whole.left
    positions = sorted({*range(0, num_bytes, num_bytes // 40), *range(num_bytes - 20, num_bytes + 1)})
    return [survival.survives(KilledInWriting(position)) for position in positions], num_bytes


def test_a_save_that_is_killed_at_any_byte_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """The last bytes are those of ``latest``."""
    [(steps, num_bytes)] = launch_on("threads", kill_at_many_bytes, 1, (tmp_path,))
    assert num_bytes > 4000
    assert steps == [2] * (len(steps) - 1) + [3]


class FullDisk(Files):
    """A disk that is full as soon as a shard is to be written."""

    def append(self, file: IO[bytes], part: Part) -> None:
        if "rank-1" in file.name:
            raise OSError(28, "No space left on device", file.name)
        super().append(file, part)


def save_on_a_full_disk(context: RankContext, folder: Path, asynchronous: bool) -> str:
    with make_pipeline(context, Shape("1f1b", 2)) as pipe:
        pipe.train_step(*make_tokens(0))
        Checkpoints(folder, pipe).save()
        pipe.train_step(*make_tokens(1))
        checkpoints = Checkpoints(folder, pipe, files=FullDisk(), asynchronous=asynchronous)
        with pytest.raises((OSError, PeerError)) as failure:  # noqa: PT012  # either of the two
            checkpoints.save()
            pipe.train_step(*make_tokens(2))
            checkpoints.wait()
        Checkpoints(folder, pipe).load()
        assert pipe.num_steps == 1
        return f"{failure.type.__name__} {failure.value}"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
def test_all_ranks_hear_of_one_that_cannot_write_and_can_go_on(asynchronous: bool, tmp_path: Path) -> None:
    first, second = launch_on("threads", save_on_a_full_disk, 2, (tmp_path, asynchronous))
    assert "PeerError rank 1 cannot save" in first
    assert "No space left on device" in first
    assert "OSError [Errno 28] No space left on device" in second
    assert len(read_state_dict(tmp_path)) > 10
