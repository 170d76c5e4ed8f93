"""From a validated export to an archive that TorchServe serves, and the proof that it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.core.lazy import imported_on_use

if TYPE_CHECKING:
    from serve.archive import TorchServeArchive
    from serve.client import Client
    from serve.kserve import KServeService, PackageKServe
    from serve.server import TorchServe
    from serve.stage import PackageTorchServe
    from serve.triton import PackageTriton, TritonRepository

__all__ = [
    "Client",
    "KServeService",
    "PackageKServe",
    "PackageTorchServe",
    "PackageTriton",
    "TorchServe",
    "TorchServeArchive",
    "TritonRepository",
]

_HOMES = {
    "serve.archive": ("TorchServeArchive",),
    "serve.client": ("Client",),
    "serve.kserve": ("KServeService", "PackageKServe"),
    "serve.server": ("TorchServe",),
    "serve.stage": ("PackageTorchServe",),
    "serve.triton": ("PackageTriton", "TritonRepository"),
}

__getattr__ = imported_on_use(__name__, _HOMES)
