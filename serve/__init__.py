"""From a validated export to an archive that TorchServe serves, and the proof that it does."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_NAMES_BY_MODULE = {
    "serve.torchserve.artifact": ("TorchServeArchive",),
    "serve.client.client": ("Client",),
    "serve.repository.kserve": ("KServeService", "PackageKServe"),
    "serve.torchserve.process": ("TorchServe",),
    "serve.torchserve.stage": ("PackageTorchServe",),
    "serve.repository.triton": ("PackageTriton", "TritonRepository"),
}

_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562): `compress --help` must not load every stage."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
