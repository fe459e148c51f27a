"""Checkpoint: a training is saved as it goes, and goes on later from there, on the same ranks or on others."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from stagewright.engine.checkpoint.files import Files, Written
from stagewright.engine.checkpoint.index import MAX_STEPS, Index, Record, find
from stagewright.engine.checkpoint.names import GlobalName, Names
from stagewright.engine.checkpoint.record import Stateful, share_of
from stagewright.engine.checkpoint.restoring import Restoration, check_all_used, names_in_use
from stagewright.engine.checkpoint.saving import BackgroundSave, Target, finish, prepare, write_shard
from stagewright.engine.checkpoint.source import Source
from stagewright.engine.checkpoint.spread import writes
from stagewright.engine.checkpoint.whole import Agreement, number_of
from stagewright.engine.pipeline import Pipeline


class Checkpoints:
    """The checkpoints of a training, in one folder that all ranks share.

    A checkpoint has the model by layer and not by rank, so that a training goes on from it with any number of ranks,
    stages and replicas, under any schedule: weights and their fp32 masters, the optimizer's state, the loss scale, the
    number of steps, the older versions that 2BW and PipeDream still read, the random generators of torch and Python on
    every rank, and the parts that the trainer names. With the same schedule and ranks the losses that follow are those
    of a training that was never interrupted, to the last bit. From an asynchronous schedule to another one, the newest
    version goes on alone.

    It is written aside, to the disk, and takes its place at one stroke: whatever is killed meanwhile, the checkpoint
    before it stays whole. Files have checksums; nothing in them is ever executed.

    Every rank makes its own with the same arguments and calls the same methods in the same order.

    Args:
        folder: where they are, or will be.
        pipe: what is trained. Saving flushes it.
        parts: what else must go on where it was, by name: learning-rate schedulers, data loaders, anything with
            ``state_dict`` and ``load_state_dict``; None on a rank that has none. Every rank's are saved, and go back to
            that rank; where ranks are others than they were, all get the first rank's.
        keep: so many checkpoints, the last ones; all where left out.
        asynchronous: copy what is saved, and write it while the training goes on. A later save waits for it, and
            raises what has gone wrong.
        global_name: (stage, name in its module) -> name in the whole model. Where left out, a module's own method
            ``global_name(name)``; where it has none, ``stage2.`` and the name, which ties checkpoints to this cut.
        files: the disk.

    Raises:
        ValueError: nothing would be kept, or two parameters would have one name.
    """

    def __init__(
        self,
        folder: Path | str,
        pipe: Pipeline,
        *,
        parts: Mapping[str, Stateful | None] | None = None,
        keep: int | None = None,
        asynchronous: bool = False,
        global_name: GlobalName | None = None,
        files: Files | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"at least one checkpoint is kept: got keep={keep}")
        self.folder = Path(folder)
        self._pipe = pipe
        self._parts = dict(parts or {})
        self._keep = keep
        self._asynchronous = asynchronous
        self._names = Names(pipe.modules, global_name)
        self._files = files or Files()
        self._background: BackgroundSave | None = None

    def save(self, step: int | None = None) -> None:
        """Save the training as it is now.

        Args:
            step: by which the checkpoint is known; the pipeline's number of steps where left out.

        Raises:
            ValueError: something cannot be kept, or names are not unique.
            OSError: a file cannot be written.
            PeerError: another rank has failed with one of these.
        """
        self.wait()
        number = number_of(self._pipe)
        step = self._pipe.num_steps if step is None else step
        if not 0 <= step < MAX_STEPS:
            raise ValueError(f"steps are counted from 0: got step {step}")
        with Agreement(self._pipe, f"save step {step}") as agreement:
            share = share_of(self._pipe, self._names, self._parts)
            is_first = number == 0 and writes(self._pipe)
            name = prepare(self._files, self.folder, step).name if is_first else None
            agreement.own = [step, name, share.record]
        if not writes(self._pipe):
            return
        steps, names, records = zip(*agreement.of_ranks)
        if set(steps) != {step}:
            raise ValueError(f"all ranks save the same step: got {sorted(set(steps))}")
        Index(step, (), records).check()
        target = Target(self.folder, names[0])
        if self._asynchronous:
            arguments = (share.copy(), step, records, self._keep)
            self._background = BackgroundSave(self._files, target, number, *arguments)
            return
        with Agreement(self._pipe, f"save step {step}") as agreement:
            agreement.own = asdict(write_shard(self._files, target, number, share))
        self._finish(target, step, [Written(**written) for written in agreement.of_ranks], records)

    def load(self, source: Path | str | None = None) -> int | None:
        """Go on from a checkpoint.

        Nothing has changed yet where it is refused because it is damaged, or of another model.

        Args:
            source: the folder of the checkpoint, or one with several, of which the newest is taken; where left out,
                that of this object.

        Returns:
            The step by which it is known; None if nothing was saved yet in the folder of this object.

        Raises:
            ValueError: there is no such checkpoint, it is damaged, or it is of another model or optimizer.
            PeerError: another rank has failed with this.
        """
        self.wait()
        folder = self.folder if source is None else Path(source)
        with Agreement(self._pipe, f"find a checkpoint in {folder}") as agreement:
            found = find(folder) if number_of(self._pipe) == 0 else None
            agreement.own = None if found is None else "." if found == folder else found.name
        name = agreement.of_ranks[0]
        if name is None and source is None:
            return None
        if name is None:
            raise ValueError(f"there is no checkpoint in {folder}")
        return self._load(folder / name)

    def wait(self) -> None:
        """Wait for a save that still goes on; every rank calls this alike.

        Raises:
            BaseException: what has gone wrong with it.
        """
        background, self._background = self._background, None
        if background is None:
            return
        try:
            with Agreement(self._pipe, "save"):
                background.wait_for_shard()
        except BaseException:
            background.cancel()
            raise
        with Agreement(self._pipe, "save"):
            background.wait()

    def close(self) -> None:
        """Wait for a save that still goes on."""
        self.wait()

    def cancel(self) -> None:
        """Leave a save that still goes on half done, as after a failure; the checkpoint before it stays."""
        background, self._background = self._background, None
        if background is not None:
            background.cancel()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for a save that still goes on; leave it half done if the block has failed."""
        if kind is None:
            self.close()
        else:
            self.cancel()

    def _finish(self, target: Target, step: int, shards: list[Written], records: tuple[Record, ...]) -> None:
        with Agreement(self._pipe, f"save step {step}"):
            if number_of(self._pipe) == 0:
                finish(self._files, target, Index(step, shards, records), self._keep)

    def _load(self, folder: Path) -> int:
        with Agreement(self._pipe, f"load {folder}") as agreement:
            source = Source(folder)
            restoration = Restoration(self._pipe, self._names, source, self._parts)
            agreement.own = [source.index.sha256, sorted(names_in_use(self._pipe, self._names))]
        digests, used = zip(*agreement.of_ranks)
        if len(set(digests)) > 1:
            raise ValueError(f"{folder} is not the same on all ranks: take a folder that they share")
        check_all_used({name for of_rank in used for name in of_rank}, source)
        restoration.apply()
        return source.index.step
