"""The headers in front of a zip's members: some readers go by them, others by the directory.

TorchServe unpacks a ``.mar`` from its beginning and never looks at the directory at its end, by
which Python's and PyTorch's readers go. Both see the same only where the members lie side by side
from the first byte on, each behind a header that says what the directory says.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from compress.core.errors import ArtifactInvalid

if TYPE_CHECKING:
    import zipfile
    from pathlib import Path
    from typing import BinaryIO

HEADER = struct.Struct("<4s5H3I2H")
"""Signature, version, flags, method, time, date, CRC, both sizes, lengths of name and extra."""
END_RECORD = struct.Struct("<4s4H2IH")
"""Of the whole archive; last comes the length of a comment."""
DESCRIBED_LATER = 8
"""Flag: CRC and sizes follow the content."""
ENCRYPTED, UTF8 = 1, 0x800
LARGE = 0xFFFFFFFF
"""Stands for a size that the extra field tells (zip64)."""


def refuse_two_readings(archive: zipfile.ZipFile, file: Path) -> None:
    """Refuse an archive whose members look otherwise to who reads it from its beginning.

    Raises:
        ArtifactInvalid: a member's header does not say what the directory does, or there are bytes
            before, between or behind the members that are of none.
    """
    with file.open("rb") as stream:
        position = 0
        for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
            if member.header_offset != position:
                raise ArtifactInvalid(
                    f"{file}: bytes {min(position, member.header_offset)} to "
                    f"{max(position, member.header_offset)} are of no member, or of two"
                )
            position = _end_of(stream, member, file)
        if position != archive.start_dir or not _ends_with_its_end(stream):
            raise ArtifactInvalid(f"{file}: holds bytes that are of no member")


def _end_of(stream: BinaryIO, member: zipfile.ZipInfo, file: Path) -> int:
    """Return where a member ends whose header says what the directory does."""
    stream.seek(member.header_offset)
    head = stream.read(HEADER.size)
    if len(head) < HEADER.size:
        raise ArtifactInvalid(f"{file}: {member.orig_filename} is truncated")
    mark, _, flags, method, _, _, crc, packed, size, name_length, extra_length = HEADER.unpack(head)
    name = stream.read(name_length)
    extra = stream.read(extra_length)
    later = flags & DESCRIBED_LATER
    expected = (member.CRC, member.compress_size, member.file_size)
    found = (crc, *_sizes(packed, size, extra))
    if (
        (mark, flags, method) != (b"PK\3\4", member.flag_bits, member.compress_type)
        or flags & ENCRYPTED
        or name != member.orig_filename.encode("utf-8" if flags & UTF8 else "cp437")
        or (found != expected and not later)
    ):
        raise ArtifactInvalid(
            f"{file}: {member.orig_filename} has a header that differs from the directory"
        )
    stream.seek(member.compress_size, 1)
    return stream.tell() + (_length_of_descriptor(stream, expected) if later else 0)


def _sizes(packed: int, size: int, extra: bytes) -> tuple[int, int]:
    """Return a header's sizes, from its extra field where they are large."""
    while LARGE in (packed, size) and len(extra) >= 4:
        kind, length = struct.unpack("<2H", extra[:4])
        if kind == 1 and length >= 16:
            size, packed = struct.unpack("<2Q", extra[4:20])
            break
        extra = extra[4 + length :]
    return packed, size


def _length_of_descriptor(stream: BinaryIO, expected: tuple[int, int, int]) -> int:
    """Return how long what follows a member's content is; 0 where it is not what is expected."""
    found = stream.read(24)
    for form in ("<4x3I", "<4xI2Q", "<3I", "<I2Q"):
        length = struct.calcsize(form)
        marked = form[1] != "4" or found.startswith(b"PK\7\10")
        if marked and len(found) >= length and struct.unpack(form, found[:length]) == expected:
            return length
    return 0


def _ends_with_its_end(stream: BinaryIO) -> bool:
    """Whether nothing follows the archive's last record, in which another one could be found."""
    stream.seek(-END_RECORD.size, 2)
    mark, *_, comment_length = END_RECORD.unpack(stream.read())
    return bool(mark == b"PK\5\6" and comment_length == 0)
