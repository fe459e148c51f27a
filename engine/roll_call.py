"""Roll call: ranks find out whether they are about to run the same thing, before anything depends on it."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from itertools import zip_longest
from typing import Any, Final

import torch

from stagewright.engine.assembly import Options
from stagewright.engine.errors import PeerError, described
from stagewright.engine.everyone import gather_texts, listed
from stagewright.engine.transport.contract import Transport
from stagewright.engine.transport.group import Group
from stagewright.schedules import Program, Schedule

# Options that are a rank's own affair.
_OWN: Final = ("optimizer", "recompute")
# What a program follows from, and what is of interest only where that does not tell the difference.
_REASONS: Final = ("version of stagewright", "schedule", "num_microbatches", "num_stages")
_RESULTS: Final = ("source of stagewright", "update rule", "placement", "program")
_REMEDY: Final = "every rank makes its Pipeline with the same arguments, by the same code"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one rank says of itself.

    Args:
        arguments: by name, in words.
        refusal: what it has against its own arguments; empty where nothing.
    """

    arguments: Mapping[str, str]
    refusal: str = ""


class RollCall:
    """A block in which each rank settles its arguments; at its end all have the same, or all raise.

    Args:
        transport: connects the ranks of this pipeline.
        group: the same rank of all replicas.
    """

    def __init__(self, transport: Transport, group: Group) -> None:
        self._transport = transport
        self._group = group
        self._answer = Answer({})
        self._csv = ""

    def answer(
        self,
        schedule: str | Schedule | Program,
        keywords: Mapping[str, object],
        program: Program,
        rule: object,
        options: Options,
        share_loss: bool,
        dynamic_shapes: bool,
    ) -> None:
        """Say what this rank is about to run.

        Args:
            schedule, keywords: what was asked for.
            program: what came of it.
            rule: by which it goes on from batch to batch, if it does.
            options, share_loss, dynamic_shapes: as ``Pipeline`` was given them.
        """
        chosen = {field.name: getattr(options, field.name) for field in fields(options) if field.name not in _OWN}
        chosen |= {"share_loss": share_loss, "dynamic_shapes": dynamic_shapes}
        self._csv = program.to_csv()
        placement = program.placement
        self._answer = Answer(
            {
                "version of stagewright": _version(),
                "schedule": _with_options(schedule, keywords) if isinstance(schedule, str) else _in_words(schedule),
                "num_microbatches": str(program.num_microbatches),
                "num_stages": str(program.num_stages),
                "source of stagewright": _source(),
                "update rule": str(program.updates),
                "placement": _digest(repr((placement.routes, placement.assignment))),
                "program": _digest(self._csv + repr(rule)),
                "version of torch": torch.__version__.partition("+")[0],
                **{name: _in_words(value) for name, value in chosen.items()},
            }
        )

    def __enter__(self) -> "RollCall":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Hear all ranks.

        Raises:
            ValueError: they differ; all of them raise it.
            PeerError: another rank has refused its arguments.
        """
        if isinstance(error, Exception):
            with suppress(PeerError):  # the error that is under way says more
                self._hear(Answer({}, described(error)))
        elif error is None:
            self._compare(self._hear(self._answer))

    def _compare(self, answers: Mapping[str, Answer]) -> None:
        for rank, answer in answers.items():
            if answer.refusal:
                raise PeerError(f"{rank} has refused its arguments: {answer.refusal}")
        found = differences({rank: answer.arguments for rank, answer in answers.items()})
        if list(found) == ["program"]:
            programs = gather_texts(self._transport, self._group, self._csv)
            found["program"] = _first_difference(programs)
        if found:
            told = "; ".join(f"{name}: {of_ranks}" for name, of_ranks in found.items())
            raise ValueError(f"ranks differ in {told}; {_REMEDY}")

    def _hear(self, own: Answer) -> dict[str, Answer]:
        texts = gather_texts(self._transport, self._group, json.dumps([own.arguments, own.refusal]))
        return {rank: read_answer(text, rank) for rank, text in texts.items()}


def read_answer(text: str, rank: str) -> Answer:
    """What a rank of whatever version has answered.

    Raises:
        ValueError: this is no answer; the rank is named.
    """
    with suppress(ValueError, RecursionError):
        match json.loads(text):
            case [dict() as arguments, str() as refusal] if all(isinstance(said, str) for said in arguments.values()):
                return Answer(arguments, refusal)
    raise ValueError(f"{rank} has not answered what it is about to run, but {text[:80]!r}; {_REMEDY}")


def differences(of_ranks: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """What ranks differ in, and who has what; of a program that differs only why it does, where that is known.

    Args:
        of_ranks: the arguments of each rank, in words, by its name.
    """
    names = dict.fromkeys(name for arguments in of_ranks.values() for name in arguments)
    found: dict[str, dict[str, list[str]]] = {}
    for name in names:
        holders: dict[str, list[str]] = {}
        for rank, arguments in of_ranks.items():
            holders.setdefault(arguments.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            found[name] = holders
    if not any(name in found for name in _RESULTS):
        found.pop("schedule", None)  # one thing under two names
    if any(name in found for name in _REASONS):
        for name in _RESULTS:
            found.pop(name, None)
    elif "source of stagewright" in found or "update rule" in found:
        found.pop("placement", None)
        found.pop("program", None)
    elif "placement" in found:
        found.pop("program", None)
    return {
        name: ", ".join(f"{value} on {listed(ranks)}" for value, ranks in holders.items())
        for name, holders in found.items()
    }


def _first_difference(programs: Mapping[str, str]) -> str:
    """The first instruction that is not the same in two programs, as text, of different ranks."""
    (first, own), *others = programs.items()
    for other, text in others:
        for rank, (one, two) in enumerate(zip_longest(own.splitlines(), text.splitlines(), fillvalue="")):
            for index, (left, right) in enumerate(zip_longest(one.split(","), two.split(","), fillvalue="nothing")):
                if left != right:
                    return f"instruction {index} of rank {rank} is {left} on {first}, {right} on {other}"
    return "it goes on differently after the first batch"


def _in_words(value: Any) -> str:
    """An argument as text that does not depend on the process."""
    match value:
        case Schedule():
            options = {field.name: getattr(value, field.name) for field in fields(value)}
            shape = ("num_ranks", "num_microbatches")
            return _with_options(value.name, {name: options[name] for name in options if name not in shape})
        case Program():
            return "a program"
        case list() | tuple():
            return f"[{', '.join(map(_in_words, value))}]"
        case str():
            return value
        case None | int() | float() | torch.dtype():
            return str(value)
        case _:
            return repr(value) if is_dataclass(value) else type(value).__name__


def _with_options(name: str, options: Mapping[str, object]) -> str:
    given = ", ".join(f"{option}={_in_words(value)}" for option, value in options.items())
    return f"{name} ({given})" if given else name


def _version() -> str:
    try:
        return metadata.version("stagewright")
    except metadata.PackageNotFoundError:
        return "unknown"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _source() -> str:
    """Of the code that makes programs and runs them; it stays what it is while a process lives."""
    packages = [resources.files(f"stagewright.{name}") for name in ("schedules", "engine")]
    return _digest("".join(f"{path}\n{text}" for package in packages for path, text in _modules_of(package)))


def _modules_of(folder: Traversable) -> list[tuple[str, str]]:
    """Name and text of every module in a folder and those within it, in a fixed order."""
    found: list[tuple[str, str]] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".py"):
            found.append((entry.name, entry.read_text(encoding="utf-8")))
        elif entry.is_dir() and entry.name != "__pycache__":
            found += _modules_of(entry)
    return found
