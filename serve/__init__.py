"""From a validated export to an archive that TorchServe serves, and the proof that it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.lazy_imports import imported_on_use

if TYPE_CHECKING:
    from serve.client.client import Client
    from serve.repository.kserve import KServeService, PackageKServe
    from serve.repository.triton import PackageTriton, TritonRepository
    from serve.torchserve.artifact import TorchServeArchive
    from serve.torchserve.process import TorchServe
    from serve.torchserve.stage import PackageTorchServe

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
    "serve.torchserve.artifact": ("TorchServeArchive",),
    "serve.client.client": ("Client",),
    "serve.repository.kserve": ("KServeService", "PackageKServe"),
    "serve.torchserve.process": ("TorchServe",),
    "serve.torchserve.stage": ("PackageTorchServe",),
    "serve.repository.triton": ("PackageTriton", "TritonRepository"),
}

__getattr__ = imported_on_use(__name__, _HOMES)
