"""Imports runtimes of native code, which then log nothing and open no connection.

They write names of a model's file to the terminal as they are, escape sequences included, beside
the exceptions that they raise. Servers and archives use this without torch.
"""

import os
import sys
from functools import cache
from typing import Any

FATAL = 4  # onnxruntime's number of a log level: all below it is raised as an exception, too
ENVIRONMENT = {
    # Their wheels (1.32, genai 0.18) send statistics to Microsoft, and keep a database for that.
    "ORT_DISABLE_TELEMETRY": "1",
    # Else a file's metadata set options of its session, such as a profile that is written.
    "ORT_LOAD_CONFIG_FROM_MODEL": "0",
    "ORTGENAI_ORT_VERBOSE_LOGGING": "0",
}
"""Variables that onnxruntime and onnxruntime-genai read when they are loaded."""


@cache
def onnx_runtime() -> Any:
    """Return the package onnxruntime."""
    os.environ.update(ENVIRONMENT)
    import onnxruntime

    # Sessions take it over, but for those that set their own.
    onnxruntime.set_default_logger_severity(FATAL)
    return onnxruntime


@cache
def onnx_runtime_genai() -> Any:
    """Return the package onnxruntime-genai."""
    onnx_runtime()
    import onnxruntime_genai

    onnxruntime_genai.set_log_options(enabled=False)
    return onnxruntime_genai


@cache
def open_vino() -> Any:
    """Return the package openvino."""
    # The import (2026.4) sends an event to Google Analytics; without this package it has a stub.
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    import openvino

    return openvino


@cache
def openvino_core() -> Any:
    """Return the core that reads and compiles models, and keeps its plugins until the end."""
    # Each core's CPU plugin (2026.4) sets a stack for signal handlers on some processors, and puts
    # back the one before when it goes: of two cores, the younger one puts back what the older one
    # has freed, and the next signal ends the process.
    return open_vino().Core()
