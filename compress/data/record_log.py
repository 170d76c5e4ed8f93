"""RecordLog: records by number in a folder that any number of processes read and append to.

Each process appends to a segment file of its own, and reads those of all. A record is

    magic | number | length | checksum of the content | checksum of these three | content

A record that a killed process left half-written is never read; one that does not match its checksum
is marked void with a warning, and may be appended again.
"""

from __future__ import annotations

import logging
import os
import struct
import uuid
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

HEADER = struct.Struct("<4sQQII")
VALID, VOID = b"keep", b"void"
SUFFIX = ".samples"

log = logging.getLogger(__name__)


@dataclass
class Segment:
    """A segment file, and how far it has been indexed."""

    path: Path
    descriptor: int
    known: int = 0
    """Bytes whose records are in the index."""
    damaged: bool = False

    def __del__(self) -> None:
        os.close(self.descriptor)


class RecordLog:
    """The records in a folder, as of the last :meth:`refresh`."""

    def __init__(self, folder: Path, count: int) -> None:
        """Index all records in a folder; their numbers are below ``count``."""
        # Seeded with the folder's name: a file copied from another folder reads as damaged.
        self.folder, self.salt = folder, zlib.crc32(folder.name.encode())
        self.segments: list[Segment] = []
        # Segment and offset of each record: twelve bytes per record.
        self.segment_of = np.full(count, -1, np.int32)
        self.place_of = np.zeros(count, np.int64)
        self.own: tuple[int, int] | None = None
        """Process id, and index of the segment that it appends to."""
        self.refresh()

    def refresh(self) -> None:
        """Index what other processes have appended since."""
        known = {segment.path for segment in self.segments}
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            if path not in known:
                self.segments.append(Segment(path, os.open(path, os.O_RDONLY)))
        for place, segment in enumerate(self.segments):
            size = os.fstat(segment.descriptor).st_size
            while not segment.damaged and segment.known + HEADER.size <= size:
                header = os.pread(segment.descriptor, HEADER.size, segment.known)
                magic, number, length, _, checksum = HEADER.unpack(header)
                end = segment.known + HEADER.size + length
                is_valid = zlib.crc32(header[4:-4], self.salt) == checksum
                if not is_valid or magic not in (VALID, VOID) or number >= len(self.segment_of):
                    segment.damaged = True
                    log.warning(
                        "%s is damaged from byte %d on; those samples are read again",
                        segment.path,
                        segment.known,
                    )
                    break
                if end > size:
                    break  # being written, or left by a process that was killed
                if magic == VALID:
                    self.segment_of[number], self.place_of[number] = place, segment.known
                segment.known = end

    def read(self, number: int) -> bytes | None:
        """Return a record; None if it is unknown or damaged."""
        place = int(self.segment_of[number])
        if place < 0:
            return None
        segment, start = self.segments[place], int(self.place_of[number])
        header = os.pread(segment.descriptor, HEADER.size, start)
        if len(header) == HEADER.size:
            _, _, length, checksum, _ = HEADER.unpack(header)
            content = os.pread(segment.descriptor, length, start + HEADER.size)
            if len(content) == length and zlib.crc32(content, self.salt) == checksum:
                return content
        log.warning("%s is damaged; sample %d is read again", segment.path, number)
        self.segment_of[number] = -1
        with suppress(OSError), segment.path.open("r+b") as stream:
            stream.seek(start)
            stream.write(VOID)  # so that no other process indexes it
        return None

    def append(self, number: int, content: bytes) -> None:
        """Append a record, unsynced, completely or not at all; raise OSError if it cannot be."""
        # A forked worker inherits its parent's segment, and must append to another one.
        if self.own is None or self.own[0] != os.getpid():
            path = self.folder / f"{uuid.uuid4().hex}{SUFFIX}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            self.segments.append(Segment(path, descriptor))
            self.own = os.getpid(), len(self.segments) - 1
        place = self.own[1]
        segment = self.segments[place]
        fields = struct.pack("<QQI", number, len(content), zlib.crc32(content, self.salt))
        record = VALID + fields + struct.pack("<I", zlib.crc32(fields, self.salt)) + content
        try:
            written = 0
            while written < len(record):
                written += os.pwrite(segment.descriptor, record[written:], segment.known + written)
        except OSError:
            # Or what is left of it behind a shorter record, appended next, would read as damage.
            os.ftruncate(segment.descriptor, segment.known)
            raise
        self.segment_of[number], self.place_of[number] = place, segment.known
        segment.known += len(record)
