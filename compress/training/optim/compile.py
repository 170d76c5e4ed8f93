"""torch.compile of the model or of its blocks, and what it needs to be installed."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from compress.common.errors import Unavailable
from compress.training.optim.transformer_blocks import chosen_blocks

if TYPE_CHECKING:
    from torch import nn

    from compress.training.config.training import Training


def compile_(module: nn.Module, training: Training) -> None:
    """Compile the model or each of its blocks in place, at the first call; names of weights stay.

    To be called after activation checkpointing, which is compiled too, and before sharding and DDP,
    whose hooks are not compiled.

    Raises:
        StageFailed: the model has no blocks.
    """
    if training.compile == "whole":
        module.compile()
    elif training.compile == "blocks":
        for block in chosen_blocks(module, training.activation_blocks, "compile: blocks"):
            block.compile()


def require_compiler(training: Training, device: str) -> None:
    """Refuse to compile without the programs that torch.compile needs.

    Raises:
        Unavailable: there is no C++ compiler, or no Triton for a CUDA device.
    """
    if training.compile == "none":
        return
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise Unavailable(
            f"compile: {training.compile} needs a C++ compiler and there is no {compiler}; install "
            "it, name another one in the environment variable CXX, or set compile: none"
        )
    if device.startswith("cuda") and find_spec("triton") is None:
        raise Unavailable(
            f"compile: {training.compile} needs Triton on a CUDA device; pip install triton, or "
            "set compile: none"
        )
