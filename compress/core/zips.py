"""Zip archives from elsewhere: what they promise to hold is judged before any of it is read."""

from __future__ import annotations

import stat
import zipfile
from typing import TYPE_CHECKING

from compress.core.errors import ArtifactInvalid
from compress.core.files import refuse_irregular, stays_inside
from compress.core.zip_headers import refuse_two_readings

if TYPE_CHECKING:
    from pathlib import Path

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
