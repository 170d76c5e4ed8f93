"""Devices besides this process, on which a gate can ask a file for its answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from compress.artifacts.artifact import Artifact
from compress.common.errors import PipelineInvalid, Unavailable
from compress.common.forward import Predictor, opened_model
from compress.common.requirements import Requirement, announced, require_all

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path


class Device(ABC):
    """Where a file can be opened besides this process, such as a browser or an emulated processor.

    A package announces a mapping of its devices by name in the group ``compress.devices``.
    """

    name: str
    """As in a gate's ``on``."""
    title: str
    kinds: frozenset[str]
    """Kinds of artifacts that it opens."""
    requirements: tuple[Requirement, ...]
    """What must be here to open a file."""

    @property
    @abstractmethod
    def version(self) -> str:
        """What answers there; measured values are kept until it changes."""

    @abstractmethod
    def open(self, artifact: Artifact, threads: int) -> AbstractContextManager[Predictor]:
        """Open an artifact of one of the kinds; raise StageFailed where it does not run there."""

    def prepare(self, qemu: Path | None, announce: Callable[[str], None]) -> None:
        """Fetch what it needs, with a QEMU of the user's if one is given; announce what.

        Raise Unavailable, which says how to get it, where only the user can.
        """
        require_all(self.requirements, self.name)


class OnDevice(Artifact):
    """An artifact that another device opens, and else is what it is."""

    # An artifact, as every gate that compares answers takes one, and outputs are kept by digest.

    def __init__(self, artifact: Artifact, device: Device) -> None:
        digest = f"{artifact.digest} on {device.name} {device.version}"
        super().__init__(artifact.path, artifact.manifest, digest)
        self.artifact, self.device = artifact, device

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Open the file there; Unavailable where something that this takes is missing."""
        require_all(self.device.requirements, f"on {self.device.name}")
        self.artifact.verify_cached()
        with self.device.open(self.artifact, threads) as predict:
            yield predict


@cache
def devices() -> dict[str, Device]:
    """Return every device by its name; Unavailable where a package's cannot be imported."""
    found: dict[str, Device] = {}
    for group in announced("compress.devices", "device").values():
        if taken := found.keys() & group.keys():
            raise Unavailable(f"device {min(taken)!r}: two packages announce this name")
        found |= group
    return found


def device_named(name: str) -> Device:
    """Return the device of a name; PipelineInvalid where there is none."""
    if name not in devices():
        raise PipelineInvalid(f"there is no device {name!r}; known: {', '.join(devices())}")
    return devices()[name]
