"""What each part of a model costs, and the file that this is kept in."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, get_args

from stagewright.models.checks import in_order, shown, whole_number
from stagewright.models.cut import Cut, Kind, Part, check_parts
from stagewright.models.partition import cut_by_costs

FORMAT: Final = "stagewright profile"
VERSION: Final = 1
LARGEST_FILE: Final = 16_000_000  # characters
LONGEST_NAME: Final = 1000
LONGEST_NUMBER: Final = 20  # digits
LONGEST_DURATION: Final = 1e9  # seconds
LARGEST_COUNT: Final = 2**63 - 1


@dataclass(frozen=True)
class PartProfile:
    """What one part costs for one microbatch.

    Args:
        name, kind: of the part.
        forward, backward: seconds; those of the last part contain the loss.
        input_gradient, weight_gradient: seconds; the halves of the backward.
        activation_bytes: what the forward keeps for the backward.
        output_bytes: what crosses to the next part.
        num_parameters, parameter_bytes: of the weights.
    """

    name: str
    kind: Kind
    forward: float
    backward: float
    input_gradient: float
    weight_gradient: float
    activation_bytes: int
    output_bytes: int
    num_parameters: int
    parameter_bytes: int

    @property
    def seconds(self) -> float:
        """What a microbatch takes in all."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Profile:
    """What every part of a model costs for one microbatch of so many rows, with one dtype on one kind of device."""

    parts: tuple[PartProfile, ...]
    num_rows: int
    dtype: str
    device: str

    def to_json(self) -> str:
        """Write it as text; `from_json` gives an equal one back."""
        head = {"format": FORMAT, "version": VERSION, "num_rows": self.num_rows}
        tail = {"dtype": self.dtype, "device": self.device, "parts": [asdict(part) for part in self.parts]}
        return json.dumps(head | tail, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> "Profile":
        """Read what `to_json` has written. Raises `ValueError` for anything else."""
        if len(text) > LARGEST_FILE:
            raise ValueError(f"a profile has at most {LARGEST_FILE} characters: got {len(text)}; measure it anew")
        try:
            read = json.loads(text, object_pairs_hook=_without_repetition, parse_int=_whole_number)
        except RecursionError as error:
            raise ValueError("a profile is a list of parts: this is nested too deeply; measure it anew") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"a profile is JSON: {error}; measure it anew") from error
        whole = _members(read, "the whole", ("format", "version", "num_rows", "dtype", "device", "parts"))
        if (whole["format"], whole["version"]) != (FORMAT, VERSION) or type(whole["version"]) is not int:
            raise _wrong("format and version", f"{FORMAT!r} and {VERSION}", (whole["format"], whole["version"]))
        if not isinstance(whole["parts"], list) or not whole["parts"]:
            raise _wrong("parts", "a list of one part or more", whole["parts"])
        parts = tuple(_part(part, f"part {index}") for index, part in enumerate(whole["parts"]))
        _check_kinds(parts)
        return Profile(
            parts,
            _count(whole["num_rows"], "num_rows", least=1),
            _text(whole["dtype"], "dtype"),
            _text(whole["device"], "device"),
        )


def cut_by_profile(
    parts: Sequence[Part], profile: Profile, num_stages: int, *, num_parameters: Sequence[int] | None = None
) -> Cut:
    """Cut so that the slowest stage, forward and backward, is as fast as can be.

    `num_parameters` has one number a part, such as `model.num_parameters()`. With it the profile of a model whose parts
    have the same names but other sizes is refused too.

    Raises `ValueError` for the profile of another model, and when there are fewer layers than stages.
    """
    check_parts(parts)
    if not isinstance(profile, Profile):
        raise TypeError(f"a profile is what measure_profile and Profile.from_json return: got {shown(profile)}")
    profiled = [(part.name, part.kind) for part in profile.parts]
    if not profiled:
        raise ValueError("a profile is of the model that is cut: got one of no parts; profile this model")
    if profiled != [(part.name, part.kind) for part in parts]:
        raise ValueError(
            f"a profile is of the model that is cut: got one of {len(profiled)} parts, {profiled[0][0]} to "
            f"{profiled[-1][0]}, for a model of {len(parts)}, {parts[0].name} to {parts[-1].name}; profile this model"
        )
    if num_parameters is not None:
        _check_sizes(profile, num_parameters)
    return cut_by_costs(parts, [part.seconds for part in profile.parts], num_stages)


def _check_sizes(profile: Profile, num_parameters: Sequence[int]) -> None:
    given = in_order(num_parameters, "the sizes of a model are one number of parameters a part, such as (10, 20)")
    sizes = [whole_number(size, f"the parameters of part {index}") for index, size in enumerate(given)]
    if len(sizes) != len(profile.parts):
        raise ValueError(
            f"every part of the model has one number of parameters: got {len(sizes)} for {len(profile.parts)} parts; "
            "pass model.num_parameters()"
        )
    for index, (part, size) in enumerate(zip(profile.parts, sizes, strict=True)):
        if part.num_parameters != size:
            raise ValueError(
                f"a profile is of the model that is cut: got one whose part {index}, {part.name}, has "
                f"{part.num_parameters} parameters, for a model where it has {size}; profile this model"
            )


def _part(value: Any, where: str) -> PartProfile:
    members = _members(value, where, tuple(field.name for field in fields(PartProfile)))
    if members["kind"] not in get_args(Kind):
        raise _wrong(f"kind of {where}", f"one of {', '.join(get_args(Kind))}", members["kind"])
    of_type: dict[str, Callable[[Any, str], Any]] = {"float": _seconds, "int": _count, "str": _text}
    checked = {
        name: of_type[kind](members[name], f"{name} of {where}")
        for name, kind in ((field.name, getattr(field.type, "__name__", "")) for field in fields(PartProfile))
        if kind in of_type
    }
    return PartProfile(kind=members["kind"], **checked)


def _check_kinds(parts: Sequence[PartProfile]) -> None:
    for index, part in enumerate(parts):
        if (part.kind == "embedding" and index > 0) or (part.kind == "head" and index < len(parts) - 1):
            raise _wrong(f"kind of part {index}", "embedding only first, head only last", part.kind)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"a profile says everything once: {names} are not distinct; measure it anew")
    return members


def _whole_number(digits: str) -> int:
    """Read a number of a length that Python reads."""
    if len(digits) > LONGEST_NUMBER:
        raise _wrong("a number", f"one of at most {LONGEST_NUMBER} digits", digits)
    return int(digits)


def _members(value: Any, where: str, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != set(names):
        got = sorted(value) if isinstance(value, dict) else value
        raise _wrong(where, f"an object with {', '.join(names)}", got)
    return value


def _seconds(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= LONGEST_DURATION:
        raise _wrong(where, f"a number of seconds from 0 to {LONGEST_DURATION:g}", value)
    return float(value)


def _count(value: Any, where: str, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST_COUNT:
        raise _wrong(where, f"a whole number from {least} to {LARGEST_COUNT}", value)
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= LONGEST_NAME:
        raise _wrong(where, f"a text of 1 to {LONGEST_NAME} characters", value)
    return value


def _wrong(where: str, wanted: str, got: Any) -> ValueError:
    """What is wrong; of what was read only the beginning is shown."""
    text = repr(got)
    shown = text if len(text) <= 80 else text[:80] + "…"
    return ValueError(f"{where} of a profile must be {wanted}: got {shown}; measure it anew")
