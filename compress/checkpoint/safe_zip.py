"""Checks zip archives for bombs, and for contents that two readers may understand differently."""

from __future__ import annotations

import stat
import struct
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from compress.common.atomic_files import refuse_irregular, stays_inside
from compress.common.errors import ArtifactInvalid

HEADER = struct.Struct("<4s5H3I2H")
"""Signature, version, flags, method, time, date, CRC, both sizes, lengths of name and extra."""
END_RECORD = struct.Struct("<4s4H2IH")
"""End of central directory; its last field is the length of a comment."""
END_SIGNATURE = b"PK\5\6"
FROM_THE_END = 2**16 + 22
"""Largest distance of the end record from the end of the file: the record and a comment."""
DESCRIBED_LATER = 8  # flag: CRC and sizes follow the content (data descriptor)
ENCRYPTED, UTF8 = 1, 0x800
LARGE = 0xFFFFFFFF  # in place of a size: it is in the extra field (zip64)
MEMBERS = 100_000  # more than one for each tensor of any model
UNPACKED_BYTES = 2**28
"""That compressed members may unpack to: torch.jit.save compresses source code, not tensors."""


def refuse_bomb(file: Path) -> None:
    """Raise ArtifactInvalid for a zip that is unsafe or unreadable; any other format passes."""
    refuse_irregular(file)
    try:
        with zipfile.ZipFile(file) as archive:
            refuse_unsafe(archive, file, UNPACKED_BYTES)
    except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError) as error:
        end = b""
        with suppress(OSError), file.open("rb") as stream:  # the format's own reader reports it
            stream.seek(max(0, file.stat().st_size - FROM_THE_END))
            end = stream.read()
        if END_SIGNATURE in end:  # PyTorch's own reader may accept what Python's does not
            raise ArtifactInvalid(
                f"{file}: not a readable archive, or truncated ({error})"
            ) from error


def refuse_unsafe(archive: zipfile.ZipFile, file: Path, unpacked: int = 0) -> None:
    """Raise ArtifactInvalid for anything that neither PyTorch nor this toolkit writes.

    That is: a member outside, twice, or a link; compressed members that unpack to more bytes than
    are given; members that share bytes, or differ for another reader.
    """
    members, names, left = archive.infolist(), set(), unpacked
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
            if left < 0 or not unpacked:
                raise ArtifactInvalid(
                    f"{file}: member {name} is compressed and unfolds to {member.file_size} bytes, "
                    f"with those before it to more than the {unpacked} that are taken"
                )
    if sum(member.compress_size for member in members) > file.stat().st_size:
        raise ArtifactInvalid(f"{file}: its members share bytes, and would unfold to any size")
    _refuse_two_readings(archive, file)


def _refuse_two_readings(archive: zipfile.ZipFile, file: Path) -> None:
    """Refuse an archive that differs for a reader of the members' own headers."""
    # TorchServe unpacks a ``.mar`` from its beginning by the header before each member, Python and
    # PyTorch use the central directory at its end. Both see the same only if the members lie side
    # by side from the first byte on, each behind a header that agrees with the directory.
    with file.open("rb") as stream:
        position = 0
        for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
            if member.header_offset != position:
                raise ArtifactInvalid(
                    f"{file}: bytes {min(position, member.header_offset)} to "
                    f"{max(position, member.header_offset)} are of no member, or of two"
                )
            position = _end_of(stream, member, file)
        # After the end record, which has no comment, nothing may follow: it could be another one.
        stream.seek(-END_RECORD.size, 2)
        signature, *_, comment_length = END_RECORD.unpack(stream.read())
        is_last = signature == END_SIGNATURE and comment_length == 0
        if position != archive.start_dir or not is_last:
            raise ArtifactInvalid(f"{file}: holds bytes that are of no member")


def _end_of(stream: BinaryIO, member: zipfile.ZipInfo, file: Path) -> int:
    """Return where a member ends; refuse a header that disagrees with the directory."""
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
    """Return a header's compressed and full size, from its zip64 extra field if they are large."""
    while LARGE in (packed, size) and len(extra) >= 4:
        kind, length = struct.unpack("<2H", extra[:4])
        if kind == 1 and length >= 16:
            size, packed = struct.unpack("<2Q", extra[4:20])
            break
        extra = extra[4 + length :]
    return packed, size


def _length_of_descriptor(stream: BinaryIO, expected: tuple[int, int, int]) -> int:
    """Return the length of a member's data descriptor; 0 where it is not as expected."""
    found = stream.read(24)
    for form in ("<4x3I", "<4xI2Q", "<3I", "<I2Q"):  # optional signature, sizes of 4 or 8 bytes
        length = struct.calcsize(form)
        is_signed = form[1] != "4" or found.startswith(b"PK\7\10")
        if is_signed and len(found) >= length and struct.unpack(form, found[:length]) == expected:
            return length
    return 0
