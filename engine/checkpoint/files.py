"""Checkpoint, files: all that saving does to a disk, in one place, where a test can stop it at any point."""

import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

Part: TypeAlias = bytes | memoryview


@dataclass(frozen=True)
class Written:
    """A file as it was written: its size in bytes, and the SHA-256 of its contents in hexadecimal digits."""

    num_bytes: int
    sha256: str


class Files:
    """The file system. What a method has done is on the disk, and not only on its way there, once ``sync`` or
    ``sync_folder`` has returned."""

    def make_folder(self, folder: Path) -> None:
        """Make a folder, and those above it that are missing."""
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, parts: Iterable[Part]) -> Written:
        """Write a whole file, to the disk.

        Raises:
            OSError: it cannot be written; it is named.
        """
        digest = hashlib.sha256()
        num_bytes = 0
        try:
            with path.open("wb") as file:
                for part in parts:
                    self.append(file, part)
                    digest.update(part)
                    num_bytes += len(part)
                self.sync(file)
        except OSError as error:
            error.filename = error.filename or str(path)  # a disk that is full does not say where
            raise
        return Written(num_bytes, digest.hexdigest())

    def append(self, file: IO[bytes], part: Part) -> None:
        """Write the next part of a file."""
        file.write(part)

    def sync(self, file: IO[bytes]) -> None:
        """Wait until a file is on the disk."""
        file.flush()
        os.fsync(file.fileno())

    def sync_folder(self, folder: Path) -> None:
        """Wait until the names in a folder are on the disk."""
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, destination: Path) -> None:
        """Give a file or folder another name at one stroke; a file takes the place of one that had it."""
        source.replace(destination)

    def remove(self, folder: Path) -> None:
        """Remove a folder with all that is in it; what does not go now is tried again with the next save."""
        shutil.rmtree(folder, ignore_errors=True)
