"""Checkpoints of `stagewright train`: when they are written, and with which flags a run may go on from one."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from stagewright.cli.corpus import Corpus
from stagewright.cli.metrics import MetricsError
from stagewright.cli.settings import TrainSettings
from stagewright.engine import Checkpoints, Pipeline, Preemption, RankContext, read_part

# What a curve depends on; the schedule, the ranks and the cut are not among it.
SAME: Final = (
    "sequence",
    "batch_size",
    "accumulate",
    "seed",
    "layers",
    "hidden",
    "heads",
    "tie",
    "optimizer",
    "dtype",
)
_PART: Final = "run"


class Run:
    """Where a run is, and what it is; a part of its checkpoints.

    Args:
        settings: of the run.
        fingerprint: of its text.
    """

    def __init__(self, settings: TrainSettings, fingerprint: str) -> None:
        self.num_updates = 0
        self._settings = settings
        self._fingerprint = fingerprint

    def state_dict(self) -> dict[str, Any]:
        """How many updates were made, which batch comes next, and all that must be the same where it goes on."""
        return {
            "updates": self.num_updates,
            "batch": self.num_updates * self._settings.accumulate,
            "text": self._fingerprint,
            **{name: getattr(self._settings, name) for name in SAME},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there. Raises ValueError where this run is another one."""
        for name in SAME:
            now, then = getattr(self._settings, name), state_dict.get(name)
            if now != then:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"the checkpoint was trained with {flag} {then}: got {flag} {now}")
        if state_dict.get("text") != self._fingerprint:
            raise ValueError("the checkpoint was trained on another text: give the same --data")
        num_updates = state_dict.get("updates")
        if not isinstance(num_updates, int) or num_updates < 0:
            raise ValueError(f"the checkpoint does not say how many updates were made: got {num_updates!r}")
        self.num_updates = num_updates


class Saving:
    """The checkpoints of one run.

    Args:
        pipe: what is trained.
        settings: say when to save.
        corpus: the text.
        preemption: may end the run before its time; None where nothing does.
    """

    def __init__(
        self, pipe: Pipeline, settings: TrainSettings, corpus: Corpus, preemption: Preemption | None = None
    ) -> None:
        self.is_preempted = False
        self._settings = settings
        self._preemption = preemption
        self._run = Run(settings, corpus.fingerprint)
        folder = settings.save or source_of(settings)
        self._checkpoints = None
        if folder is not None:
            parts = {_PART: self._run}
            self._checkpoints = Checkpoints(
                folder, pipe, parts=parts, keep=settings.keep, asynchronous=settings.save_async
            )

    def resume(self) -> int:
        """Go on from a checkpoint if one is wanted and there is one, and return how many updates it has behind it."""
        source = source_of(self._settings)
        if self._checkpoints is not None and source is not None:
            self._checkpoints.load(None if self._settings.resume is True else source)
        return self._run.num_updates

    def step_done(self) -> None:
        """An update was made: save it if it is its turn, and find out whether it was the last for now."""
        self._run.num_updates += 1
        every, done = self._settings.save_every, self._run.num_updates
        self.is_preempted = self._preemption is not None and self._preemption.ends_after(done)
        if every is not None and done % every == 0 and done < self._settings.steps and not self.is_preempted:
            self._save()

    def last_step_done(self) -> None:
        """No more updates are made: save what has come out, to the disk."""
        self._save()
        if self._checkpoints is not None:
            self._checkpoints.close()

    def give_up(self) -> None:
        """The run has failed: leave undone what goes on in the background."""
        if self._checkpoints is not None:
            self._checkpoints.cancel()

    def _save(self) -> None:
        if self._checkpoints is not None and self._settings.save is not None:
            self._checkpoints.save(self._run.num_updates)


@contextmanager
def open_saving(pipe: Pipeline, settings: TrainSettings, corpus: Corpus, context: RankContext) -> Iterator[Saving]:
    """The checkpoints of a run, as long as it lasts; SIGTERM ends it early if the settings say so."""
    with ExitStack() as stack:
        preemption = stack.enter_context(Preemption(context.transport)) if settings.save_on_sigterm else None
        saving = Saving(pipe, settings, corpus, preemption)
        try:
            yield saving
        except BaseException:
            saving.give_up()
            raise
    if saving.is_preempted:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process is about to end, whoever tells it once more


def source_of(settings: TrainSettings) -> Path | None:
    """Where to look for a checkpoint to go on from."""
    return settings.save if settings.resume is True else settings.resume


def check_saving(settings: TrainSettings, corpus: Corpus) -> None:
    """Find out whether a run can be saved and resumed as the settings say. Raises ValueError."""
    given = {
        "--save-every": settings.save_every,
        "--keep": settings.keep,
        "--save-async": settings.save_async,
        "--save-on-sigterm": settings.save_on_sigterm,
    }
    for flag, value in given.items():
        if value and settings.save is None:
            raise ValueError(f"{flag} says how to save: say where with --save DIR")
    if settings.resume is True and settings.save is None:
        raise ValueError("--resume goes on from the folder of --save: give --save DIR, or --resume DIR")
    num_updates = resumed_updates(settings, corpus)
    if num_updates is None and settings.resume not in (None, True):
        raise ValueError(f"there is no checkpoint in {settings.resume} to resume from")
    if num_updates is not None and num_updates >= settings.steps and settings.resume is not True:
        raise ValueError(f"{settings.resume} has {nothing_left(num_updates, settings)}")


def nothing_left(num_updates: int, settings: TrainSettings) -> str:
    """What to say of a checkpoint in which a run has come to its end."""
    return (
        f"{num_updates} of {settings.steps} updates behind it: nothing is left to do; give more --steps to train it on"
    )


def make_save_folder(folder: Path) -> None:
    """Make the folder of the checkpoints. Raises MetricsError where nothing could be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MetricsError(f"cannot save to {folder}: {error.strerror or error}") from error


def resumed_updates(settings: TrainSettings, corpus: Corpus) -> int | None:
    """How many updates a run will find made; None where it begins anew. Raises ValueError where it cannot go on."""
    source = source_of(settings)
    state = None if source is None else read_part(source, _PART)
    if state is None:
        return None
    run = Run(settings, corpus.fingerprint)
    run.load_state_dict(state)
    return run.num_updates
