"""Checkpoint, saving: from the shares of all ranks to a folder that is there as a whole or not at all.

    every rank      writes its shard into DIR/.step-20.save-2.partial, and waits until it is on the disk
    rank 0          writes the index beside the shards, renames the folder to DIR/step-20.save-2,
                    lets DIR/latest name it, and only then removes what is too old to be kept

Whatever is killed in the midst of this, ``latest`` names a whole checkpoint: the one before, or this one.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from stagewright.engine.checkpoint.files import Files, Part, Written
from stagewright.engine.checkpoint.index import INDEX, LATEST, Index, Record, folder_name, save_of, shard_name
from stagewright.engine.checkpoint.record import Share
from stagewright.engine.checkpoint.shards import parts_of

_PARTIAL: Final = ".partial"
_PATIENCE: Final = 0.02  # seconds between two looks for what other ranks have written


@dataclass(frozen=True)
class Target:
    """Where a checkpoint goes.

    Args:
        folder: with all checkpoints.
        name: of this one's own folder.
    """

    folder: Path
    name: str

    @property
    def partial(self) -> Path:
        """Where it is as long as it is not whole."""
        return self.folder / f".{self.name}{_PARTIAL}"


def prepare(files: Files, folder: Path, step: int) -> Target:
    """Remove what earlier saves have left half done, and make the folder for the next one; rank 0 alone does this."""
    files.make_folder(folder)
    for leftover in folder.glob(".step-*"):
        files.remove(leftover)
    saves = [save for path in folder.iterdir() if (save := save_of(path.name)) is not None]
    target = Target(folder, folder_name(step, max(saves, default=0) + 1))
    files.make_folder(target.partial)
    return target


def write_shard(files: Files, target: Target, rank: int, share: Share, stop: threading.Event | None = None) -> Written:
    """Write what a rank contributes, until it is told to stop."""
    return files.write(target.partial / shard_name(rank), _until(stop, parts_of(share.tensors)))


def finish(files: Files, target: Target, index: Index, keep: int | None) -> None:
    """Make a checkpoint of the shards that are there, and remove older ones; rank 0 alone does this.

    Raises:
        OSError: a shard is not there, as on a disk that the ranks do not share.
    """
    for rank, shard in enumerate(index.shards):
        path = target.partial / shard_name(rank)
        if not path.exists() or path.stat().st_size != shard.num_bytes:
            raise OSError(
                f"rank 0 does not find what rank {rank} has written, {path}: take a folder that all ranks share"
            )
    files.write(target.partial / INDEX, [index.to_json()])
    files.sync_folder(target.partial)
    files.rename(target.partial, target.folder / target.name)
    files.sync_folder(target.folder)
    latest = target.folder / LATEST
    files.write(latest.with_name(f".{LATEST}.new"), [f"{target.name}\n".encode()])
    files.rename(latest.with_name(f".{LATEST}.new"), latest)
    files.sync_folder(target.folder)
    if keep is not None:
        prune(files, target.folder, keep)


def prune(files: Files, folder: Path, keep: int) -> None:
    """Keep the checkpoints that were saved last; what goes is first renamed, so that nothing half removed passes for
    a checkpoint."""
    saved = sorted((save, path) for path in folder.iterdir() if (save := save_of(path.name)) is not None)
    for _, path in saved[:-keep]:
        hidden = path.with_name(f".{path.name}.old")
        files.rename(path, hidden)
        files.remove(hidden)


class BackgroundSave:
    """A save that goes on in a thread of each rank while these train.

    The transport belongs to the training meanwhile, so ranks tell rank 0 by files that their shards are there.

    Args:
        files: the disk.
        target: where the checkpoint goes.
        rank: this one.
        share: what it contributes, copied.
        step: of the trainer.
        records: those of all ranks.
        keep: so many checkpoints.
    """

    def __init__(
        self,
        files: Files,
        target: Target,
        rank: int,
        share: Share,
        step: int,
        records: Sequence[Record],
        keep: int | None,
    ) -> None:
        self._files, self._target, self._rank, self._share = files, target, rank, share
        self._step, self._records, self._keep = step, records, keep
        self._stop = threading.Event()
        self._is_written = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"stagewright checkpoint {rank}", daemon=True)
        self._thread.start()

    def wait_for_shard(self) -> None:
        """Wait until this rank's own shard is written.

        Raises:
            BaseException: what has kept it from being written.
        """
        self._is_written.wait()
        self._raise()

    def wait(self) -> None:
        """Wait until this rank has done all it had to; once all shards are there, it does not wait for others.

        Raises:
            BaseException: what has kept it from being done.
        """
        self._thread.join()
        self._raise()

    def cancel(self) -> None:
        """Leave it half done."""
        self._stop.set()
        self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            written = write_shard(self._files, self._target, self._rank, self._share, self._stop)
            self._share.tensors.clear()
            _report(self._files, self._target, self._rank, written)
            self._is_written.set()
            if self._rank == 0:
                shards = [self._await_report(rank) for rank in range(len(self._records))]
                finish(self._files, self._target, Index(self._step, shards, self._records), self._keep)
        except BaseException as error:
            self._error = error
        finally:
            self._is_written.set()

    def _await_report(self, rank: int) -> Written:
        path = self._target.partial / _report_name(rank)
        while not path.exists():
            if self._stop.wait(_PATIENCE):
                raise Cancelled
        report: dict[str, Any] = json.loads(path.read_bytes())
        path.unlink()
        return Written(**report)


class Cancelled(Exception):  # noqa: N818  # it is no error
    """A save is left half done, because the training has ended."""


def _report(files: Files, target: Target, rank: int, written: Written) -> None:
    path = target.partial / _report_name(rank)
    unfinished = path.with_suffix(".new")
    files.write(unfinished, [json.dumps(asdict(written)).encode()])
    files.rename(unfinished, path)


def _report_name(rank: int) -> str:
    return f"rank-{rank}.written.json"


def _until(stop: threading.Event | None, parts: Iterator[Part]) -> Iterator[Part]:
    for part in parts:
        if stop is not None and stop.is_set():
            raise Cancelled
        yield part
