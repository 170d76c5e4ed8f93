"""Says what a file is that a reader of another format was given, and how to use it."""

from __future__ import annotations

import zipfile
from contextlib import suppress
from pathlib import Path

from compress.common.errors import ArtifactInvalid, first_line

TORCHSCRIPT, PROGRAM, COMPILED = "TorchScript", "a torch.export program", "an AOTInductor package"
SAVED, SAFETENSORS = "a file that torch.save wrote", "a readable safetensors file"
AS_WEIGHTS = "give it as the checkpoint, and as the model the function that builds it"
AS_MODEL = "it is a whole model, so give it as the model itself, named"
AS_CODE = "it is code, so open it in a function of your own, and give that as the model"
RESAVE = "write the weights with torch.save(…) or as .safetensors"
ARCHIVES = {
    "/data/aotinductor/": (COMPILED, "it is native code, so give the model that was compiled"),
    "/constants.pkl": (TORCHSCRIPT, f"{AS_MODEL} .ts"),
    "/archive_format": (PROGRAM, f"{AS_MODEL} .pt2"),
    "/.data/extern_modules": ("a torch.package", AS_CODE),
    "/data.pkl": (SAVED, AS_WEIGHTS),
    ".npy": ("arrays of NumPy", RESAVE),
}
"""Part of a member's name → what an archive with it is, and what to do; the first one counts."""
LEGACY_TORCH = b"\x8a\n"  # torch.save before 1.6: its magic number follows pickle's own two bytes


def unreadable(file: Path, expected: str, error: Exception | str, at: str = "") -> ArtifactInvalid:
    """Build the error for a file that is not what was expected: what it is, or why not."""
    kind, advice = kind_of(file)
    if kind not in ("", expected):
        return ArtifactInvalid(f"{at}{file}: not {expected}, but {kind}: {advice}")
    reason = error if isinstance(error, str) else f"{type(error).__name__}: {first_line(error)}"
    reason = reason.partition(" This is an internal")[0]  # torch's, that the file may be corrupted
    return ArtifactInvalid(f"{at}{file}: not {expected}, or truncated ({reason})")


def kind_of(file: Path) -> tuple[str, str]:
    """Return what a file is by its content, and what to do with it; empty texts if unknown."""
    start, names = b"", list[str]()
    with suppress(OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        with file.open("rb") as stream:
            start = stream.read(9)
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    if start[:1] == b"\x80" and start[2:4] != LEGACY_TORCH:
        return "a pickle", RESAVE
    if start[8:] == b"{":
        return SAFETENSORS, AS_WEIGHTS
    return next((k for part, k in ARCHIVES.items() if any(part in n for n in names)), ("", ""))
