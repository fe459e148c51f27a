"""Output: the format in which a command writes to a file, and the writing."""

from collections.abc import Sequence
from pathlib import Path

from stagewright.schedules import ScheduleError


def format_of(file: Path | None, formats: Sequence[str]) -> str:
    """What the end of a file's name says where --format is left out; text, the first format, where it has none.

    Raises:
        ScheduleError: it names a format that there is not.
    """
    endings = {".trace.json": "trace", ".txt": "text"} | {f".{name}": name for name in formats[1:]}
    name = "" if file is None else file.name.lower()
    form = next((form for ending, form in endings.items() if name.endswith(ending)), None)
    if form is None and Path(name).suffix:
        raise ScheduleError(
            f"the end of a file's name says its format: {Path(name).suffix} is none of {' '.join(endings)}; "
            "take one of these, or say --format"
        )
    return form or "text"


def write(file: Path, text: str) -> None:
    """Write a file.

    Raises:
        ScheduleError: it cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise ScheduleError(f"cannot write {file}: {error.strerror}") from error
