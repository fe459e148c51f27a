"""Registry: schedules by name."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from numbers import Integral, Real
from types import MappingProxyType
from typing import Final, TypeVar

from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.schedule import Schedule

_KINDS: Final[Mapping[object, tuple[tuple[type, ...], str]]] = MappingProxyType(
    {
        bool: ((bool,), "true or false"),
        int: ((Integral,), "a whole number from 1 up"),
        int | None: ((Integral,), "a whole number from 1 up"),
        float: ((Real,), "a number"),
        float | None: ((Real,), "a number"),
        tuple[int, ...]: ((tuple, list), "a number for each stage, such as (2, 1)"),
    }
)

AnySchedule = TypeVar("AnySchedule", bound=type[Schedule])

# The one table that importing a module may add to: a name must work everywhere once its class exists.
_SCHEDULES: Final[dict[str, type[Schedule]]] = {}
_SHAPE: Final = ("num_ranks", "num_microbatches")


def register(schedule: AnySchedule) -> AnySchedule:
    """Class decorator: make a schedule known by its ``name`` and ``aliases``, everywhere a name is taken.

    The aliases of a class that it was derived from stay with that one.

    Raises:
        ScheduleError: another schedule has that name already.
    """
    for name in (schedule.name, *schedule.__dict__.get("aliases", ())):
        known = _SCHEDULES.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (schedule.__module__, schedule.__qualname__):
            raise ScheduleError(
                f"a name belongs to one schedule: {name!r} is {known.__qualname__} already; take another"
            )
        _SCHEDULES[name] = schedule
    return schedule


def schedules() -> Mapping[str, type[Schedule]]:
    """All registered classes by name, aliases included."""
    return MappingProxyType(_SCHEDULES)


def names() -> tuple[str, ...]:
    """The names of all registered schedules, aliases left out, in order of registration."""
    return tuple(name for name, schedule in _SCHEDULES.items() if name == schedule.name)


def find(name: str) -> type[Schedule]:
    """The schedule class of a name or alias; case and ``_`` for ``-`` do not matter.

    Raises:
        ScheduleError: there is none; close names are suggested.
    """
    wanted = name.strip().lower().replace("_", "-")
    if name in _SCHEDULES:
        return _SCHEDULES[name]
    if wanted in _SCHEDULES:
        return _SCHEDULES[wanted]
    close = get_close_matches(wanted, _SCHEDULES, n=3)
    remedy = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names())}"
    raise ScheduleError(f"there is no schedule {name!r}; {remedy}")


def check_kinds(kind: type[Schedule], options: Mapping[str, object]) -> None:
    """Refuse an option whose value is of the wrong kind: ``no`` is true to Python, and would be taken for it."""
    for field in fields(kind):
        value = options.get(field.name)
        types, words = _KINDS.get(field.type, ((), ""))
        if value is None or not types:
            continue
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types) or value != value:
            raise ScheduleError(f"{field.name} is {words}: got {value!r}")


def create(name: str, *, num_ranks: int, num_microbatches: int, **options: object) -> Schedule:
    """Make a schedule by name.

    Args:
        name: a registered name or alias.
        num_ranks: ranks of the pipeline.
        num_microbatches: microbatches of one batch.
        options: what else the schedule takes, such as ``num_chunks``; a schedule that has no
            ``num_chunks`` of its own accepts the number of stages that it gives each rank anyway.

    Raises:
        ScheduleError: no such name, no such option, or a shape that the schedule cannot serve.
    """
    kind = find(name)
    known = [field.name for field in fields(kind) if field.init and field.name not in _SHAPE]
    num_chunks = options.pop("num_chunks", None) if "num_chunks" not in known else None
    unknown = [option for option in options if option not in known]
    if unknown:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise ScheduleError(f"{kind.name} has no option {unknown[0]!r}: {takes}")
    check_kinds(kind, options)
    required = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    missing = [option for option in required if option not in options and option not in _SHAPE]
    if missing:
        raise ScheduleError(f"{kind.name} needs the option {missing[0]!r}")
    schedule = kind(num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    if num_chunks is not None and schedule.placement.num_chunks != num_chunks:
        raise ScheduleError(
            f"{kind.name} gives each rank {schedule.placement.num_chunks} stage(s): got num_chunks={num_chunks}; "
            "leave it out"
        )
    return schedule
