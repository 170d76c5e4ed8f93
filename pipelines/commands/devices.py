"""`compress devices`: where gates can open a file besides this machine, and what that takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from compress.common.config import Settings
from compress.common.errors import PipelineInvalid
from compress.core.devices import devices
from compress.core.validation_errors import did_you_mean


class ListedDevice(Settings):
    """A device, and whether gates can use it here."""

    name: str
    title: str
    missing: tuple[str, ...]
    """What it needs and how to get it; empty where it is ready."""

    def line(self) -> str:
        """Return it for the terminal."""
        sign, needs = ("✗", f": {'; '.join(self.missing)}") if self.missing else ("✓", "")
        return f"{sign} {self.title}{needs}"


def list_devices(
    prepared: Sequence[str], qemu: Path | None, announce: Callable[[str], None]
) -> list[ListedDevice]:
    """Prepare the named devices, and return all; PipelineInvalid for an unknown name."""
    for name in prepared:
        if name not in devices():
            raise PipelineInvalid(
                f"--prepare {name!r}: no such device; {did_you_mean(name, devices())}"
            )
        devices()[name].prepare(qemu, announce)
    return [
        ListedDevice(
            name=name,
            title=device.title,
            missing=tuple(need.problem for need in device.requirements if need.missing()),
        )
        for name, device in devices().items()
    ]
