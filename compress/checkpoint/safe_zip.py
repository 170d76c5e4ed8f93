"""Zip archives from elsewhere, checked before anything in them is read.

A small archive may promise to unpack to any size. And readers may disagree on what is in it:
TorchServe unpacks a ``.mar`` from its beginning by the headers in front of its members, Python and
PyTorch go by the directory at its end. Both see the same only where the members lie side by side
from the first byte on, each behind a header that says what the directory says.
"""

from __future__ import annotations

import stat
import struct
import zipfile
from typing import TYPE_CHECKING

from compress.common.atomic_files import refuse_irregular, stays_inside
from compress.common.errors import ArtifactInvalid

if TYPE_CHECKING:
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


MEMBERS = 100_000
"""More than a tensor each of any model."""
UNFOLDED = 2**28
"""Bytes that compressed members may hold: torch.jit.save compresses source code, never tensors."""
END = b"PK\5\6"
"""Begins the last record of a zip."""
FROM_THE_END = 2**16 + 22
"""Bytes from there to the end of the file at most: the record and a comment."""


def refuse_bomb(file: Path) -> None:
    """Refuse a zip that unfolds elsewhere, or to far more than itself; any other file passes.

    Raises:
        ArtifactInvalid: see :func:`refuse_unsafe`; Python cannot read its directory; or it is a
            pipe or a device.
    """
    refuse_irregular(file)
    try:
        with zipfile.ZipFile(file) as archive:
            refuse_unsafe(archive, file, UNFOLDED)
    except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError) as error:
        if _ends_like_a_zip(file):  # PyTorch's own reader may take what Python's does not
            raise ArtifactInvalid(
                f"{file}: not a readable archive, or truncated ({error})"
            ) from error


def _ends_like_a_zip(file: Path) -> bool:
    """Whether the end of an archive's directory is where readers look for it."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - FROM_THE_END))
            return END in stream.read()
    except OSError:
        return False  # whoever reads it says what it is


def refuse_unsafe(archive: zipfile.ZipFile, file: Path, unfolded: int = 0) -> None:
    """Refuse what neither PyTorch nor this toolkit writes into an archive.

    Args:
        archive: the archive.
        file: where it lies.
        unfolded: how many bytes its compressed members may hold.

    Raises:
        ArtifactInvalid: a member is named like another, or like a file outside, or is a link;
            compressed ones hold too much, as few bytes can; or members share their bytes, or
            look otherwise to another reader.
    """
    members, names, left = archive.infolist(), set(), unfolded
    if len(members) > MEMBERS:
        raise ArtifactInvalid(f"{file}: holds {len(members)} members, more than {MEMBERS}")
    for member in members:
        name = member.orig_filename
        if not stays_inside(name):
            raise ArtifactInvalid(f"{file}: member {name[:80]!r} is not a plain relative path")
        if name in names:
            raise ArtifactInvalid(f"{file}: {name} is in the archive twice")
        if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
            raise ArtifactInvalid(f"{file}: member {name} is a link or a device, not a file")
        names.add(name)
        if member.compress_type != zipfile.ZIP_STORED:
            left -= member.file_size
            if left < 0 or not unfolded:
                raise ArtifactInvalid(
                    f"{file}: member {name} is compressed and unfolds to {member.file_size} bytes, "
                    f"with those before it to more than the {unfolded} that are taken"
                )
    if sum(member.compress_size for member in members) > file.stat().st_size:
        raise ArtifactInvalid(f"{file}: its members share bytes, and would unfold to any size")
    refuse_two_readings(archive, file)
