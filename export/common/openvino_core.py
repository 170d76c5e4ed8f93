"""OpenVINO's entry point, one for the process; servers use it without torch."""

from functools import cache
from typing import Any


@cache
def openvino_core() -> Any:
    """Return the core that reads and compiles models, and keeps its plugins until the end."""
    import openvino

    # Each core's CPU plugin (2026.4) sets a stack for signal handlers on some processors, and puts
    # back the one before when it goes: of two cores, the younger one puts back what the older one
    # has freed, and the next signal ends the process.
    return openvino.Core()
