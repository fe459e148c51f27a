"""The text to learn: which files, and which of them are held out for validation."""

import hashlib
import math
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
FOREIGN_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
VALIDATION_SHARE = 0.1
# Of all bytes, what the files that are held out may have.
LEAST_SHARE, MOST_SHARE = 0.01, 0.75
# Every rank holds all of the text in memory.
MAX_BYTES = 2**32


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes to train on, bytes to validate on, and what they are, in words."""

    train: bytes
    validation: bytes
    description: str

    @property
    def fingerprint(self) -> str:
        """A digest of all the text, by which two machines can tell whether they read the same."""
        digest = hashlib.sha256(f"{len(self.train)} {len(self.validation)}\n".encode())
        digest.update(self.train)
        digest.update(self.validation)
        return digest.hexdigest()


def load_corpus(path: Path | None = None) -> Corpus:
    """Read a file or a folder, or the Python standard library's own sources where no path is given.

    A folder is split by file. A single file is split 90/10 at a line boundary, and so are files of which those that
    are held out would have next to none of the text, or next to all.
    Raises ValueError where there is nothing to read, too little to split, or too much.
    """
    if path is None:
        return load_standard_library()
    try:
        if path.is_dir():
            return split_files(path, text_files(path), name=str(path))
        if not path.exists():
            raise ValueError(f"no such file or folder: {path}; --data takes a file or a folder of text")
        if not path.is_file():
            raise ValueError(f"{path} is no file that every rank could read for itself; --data takes a regular one")
        check_size([path], name=str(path))
        return split_one(path.read_bytes(), name=str(path))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error


def load_standard_library() -> Corpus:
    """Read the .py files of this Python's standard library, its test suites left out."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = TEST_FOLDERS | FOREIGN_FOLDERS
    sources = (file for file in root.rglob("*.py") if left_out.isdisjoint(file.relative_to(root).parts[:-1]))
    return split_files(root, sources, name="the Python standard library")


def text_files(root: Path) -> Iterable[Path]:
    """Every regular file below a folder."""
    return (file for file in root.rglob("*") if file.is_file())


def split_files(root: Path, files: Iterable[Path], name: str) -> Corpus:
    """Hold out about a tenth of the files, chosen by a hash of their names and so the same on every machine."""
    files, texts = list(files), {}
    check_size(files, name)
    for file in files:
        content = file.read_bytes()
        if content and is_text(content):
            texts[file.relative_to(root).as_posix()] = content
    if not texts:
        raise ValueError(f"no text in {name}: --data needs at least one file that is not empty and is UTF-8")
    if len(texts) == 1:
        return split_one(next(iter(texts.values())), name=name)

    held_out = choose_validation(texts)
    train = [texts[key] for key in sorted(texts) if key not in held_out]
    validation = [texts[key] for key in sorted(held_out)]
    num_bytes = sum(map(len, texts.values()))
    if not LEAST_SHARE < sum(map(len, validation)) / num_bytes < MOST_SHARE:  # a few files of very different length
        return split_one(b"".join(texts[key] for key in sorted(texts)), name=f"{name}: {len(texts)} files as one text")
    description = f"{name}: {len(train)} files to train on, {len(validation)} to validate"
    return Corpus(b"".join(train), b"".join(validation), description)


def check_size(files: Iterable[Path], name: str) -> None:
    """Refuse more text than there can be, before any of it is read."""
    num_bytes = sum(file.stat().st_size for file in files)
    if num_bytes > MAX_BYTES:
        raise ValueError(
            f"every rank holds the whole text in memory: {name} has {num_bytes} bytes, at most {MAX_BYTES} will do; "
            "give --data a part of it"
        )


def choose_validation(names: Iterable[str]) -> frozenset[str]:
    """Choose about a tenth of two or more names, never none and never all."""
    by_share = sorted(names, key=hash_share)
    num_below = sum(hash_share(name) < VALIDATION_SHARE for name in by_share)
    return frozenset(by_share[: min(max(num_below, 1), len(by_share) - 1)])


def hash_share(name: str) -> float:
    """Map a name to a number in [0, 1) that depends on nothing else."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6]) / 2**48


def split_one(content: bytes, name: str) -> Corpus:
    """Split one text at the line boundary nearest after nine tenths, or there exactly where it has none."""
    if len(content) < 2:
        raise ValueError(f"{name} has {len(content)} bytes: too short to split into training and validation text")
    wanted = int(len(content) * (1 - VALIDATION_SHARE))
    boundary = content.find(b"\n", max(wanted - 1, 0)) + 1
    if boundary in (0, len(content)):
        boundary = content.rfind(b"\n", 0, wanted) + 1 or wanted
    description = f"{name}: split 90/10 at a line boundary"
    return Corpus(content[:boundary], content[boundary:], description)


def is_text(content: bytes) -> bool:
    """Say whether the bytes are UTF-8 text; a zero byte is valid UTF-8, but no text has one."""
    if b"\0" in content:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def unigram_bits_per_byte(train: bytes, validation: bytes) -> float:
    """The cross entropy, in bits per byte, of one text under the byte frequencies of another.

    Every byte counts once more than it was seen (add-one smoothing), so that an unseen one costs much but not
    everything. A model that has learned anything about order must do better than this.
    """
    seen = Counter(train)
    total = len(train) + 256
    bits = sum(count * -math.log2((seen[byte] + 1) / total) for byte, count in Counter(validation).items())
    return bits / len(validation)
