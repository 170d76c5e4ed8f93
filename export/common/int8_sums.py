"""Whether this processor adds products of 8-bit numbers exactly; servers use it without torch."""

import platform
from functools import cache
from pathlib import Path

EXACT_INSTRUCTIONS = {"avx_vnni", "avx512_vnni", "amx_int8"}
"""As Linux and :func:`torch.cpu.get_capabilities` call them."""


@cache
def has_16_bit_sums() -> bool:
    """Whether int8 kernels may add products in 16 bits: on x86 processors without VNNI or AMX.

    Sums of two products of 8-bit numbers are cut off there; onnxruntime, oneDNN and FBGEMM do so.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:  # not Linux
        try:
            import torch
        except ImportError:  # in an archive of an ONNX file: exact sums are right everywhere
            return True
        known = torch.cpu.get_capabilities()
        return not any(known.get(name) for name in EXACT_INSTRUCTIONS)
    return not EXACT_INSTRUCTIONS & set(cpuinfo.split())
