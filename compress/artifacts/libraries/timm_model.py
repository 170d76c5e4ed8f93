"""Builds architectures of timm, also where torchvision, which timm imports, is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from compress.artifacts.hf_folder import offline, refuse_lookups
from compress.common.errors import Unavailable, raised_as

FACTORY = "compress.artifacts.libraries.timm_model:build"


def build(model_name: str, **arguments: Any) -> torch.nn.Module:
    """Return `timm.create_model(model_name, **arguments)`; recipes name this function."""
    refuse_lookups({"architecture": model_name, **arguments}, model_name)
    with offline(model_name):
        module: torch.nn.Module = import_timm().create_model(model_name, **arguments)
    return module


def import_timm() -> Any:
    """Import timm, or raise Unavailable; without torchvision all of it but `timm.data`."""
    advice = "; `compress doctor` says whether torchvision fits torch; timm works without it, too"
    with raised_as(Unavailable, "timm cannot be imported", advice):
        if "timm" in sys.modules or importlib.util.find_spec("torchvision") is not None:
            return importlib.import_module("timm")
        return _import_without_torchvision()


def _import_without_torchvision() -> Any:
    # timm's architectures take two things of what needs torchvision: constants of timm.data, and
    # a class that isinstance looks for. Both modules are there for the time of the import only, so
    # that nobody takes torchvision for installed, and `import timm.data` fails as it always did.
    spec = importlib.util.find_spec("timm")
    folder = Path(((spec and spec.submodule_search_locations) or [""])[0])
    data, misc = ModuleType("timm.data"), ModuleType("torchvision.ops.misc")
    constants = runpy.run_path(str(folder / "data" / "constants.py"))
    vars(data).update({name: value for name, value in constants.items() if name.isupper()})
    vars(misc)["FrozenBatchNorm2d"] = FrozenBatchNorm2d
    stand_ins = {module.__name__: module for module in (data, misc)}
    sys.modules.update(stand_ins)
    try:
        return importlib.import_module("timm")
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)


class FrozenBatchNorm2d(torch.nn.Module):
    """Has no instances: what timm asks its layers whether they are it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise Unavailable("FrozenBatchNorm2d is a layer of torchvision, which is not installed")
