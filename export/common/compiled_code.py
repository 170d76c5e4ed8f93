"""What compiled code is bound to, its inputs, batches in parts; torch is imported in functions."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.errors import Unavailable
from compress.common.lazy_modules import torch
from compress.common.requirements import Requirement

if TYPE_CHECKING:
    from compress.common.signature import Signature

    Tensors = tuple[torch.Tensor, ...]


class CudaDevice(Requirement):
    """A graphics processor that PyTorch sees."""

    def missing(self) -> bool:
        """Whether there is none."""
        return not torch.cuda.is_available()


CUDA = CudaDevice(what="a CUDA device", install="use `device: cpu`")


def built_for(device: str) -> dict[str, Any]:
    """Return what code compiled here for a device needs: a processor, a system, a PyTorch."""
    host: dict[str, Any] = {
        "device": device,
        "system": platform.system(),
        "machine": platform.machine(),
        "torch": torch.__version__.partition("+")[0],
    }
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return host | {"compute_capability": f"{major}.{minor}", "cuda": torch.version.cuda}
    # Inductor compiles with `-march=native`, which may use any instruction of this processor.
    capabilities = torch.cpu.get_capabilities()
    return host | {
        "instructions": sorted(name for name, has in capabilities.items() if has is True)
    }


def refuse_other_host(needed: Mapping[str, Any], file: Path) -> None:
    """Raise Unavailable for code that was compiled for another machine; name what differs."""
    if needed["device"] == "cuda" and CUDA.missing():
        raise Unavailable(f"{file}: compiled for CUDA, and there is no CUDA device here")
    here = built_for(needed["device"])
    for name, value in needed.items():
        if isinstance(value, list):  # instruction sets, of which this host may have more
            lacking = sorted(set(value) - set(here[name]))
            problem = f"a processor with {', '.join(lacking)}, which this one has not"
            differs = bool(lacking)
        else:
            problem = f"{name.replace('_', ' ')} {value}, found {here[name]}"
            differs = here[name] != value
        if differs:
            raise Unavailable(f"{file}: compiled for {problem}; run export_aot here")


def checked(run: Callable[..., Tensors], signature: Signature) -> Callable[..., Tensors]:
    """Return a function that raises ValueError for other types or shapes than a signature's.

    Compiled code reads memory by the sizes that it was made for, whatever it is given.
    """

    def run_checked(*inputs: torch.Tensor) -> Tensors:
        sizes: dict[str, int] = {}
        for spec, tensor in zip(signature.inputs, inputs, strict=True):
            fits = tensor.dim() == len(spec.shape) and str(tensor.dtype) == f"torch.{spec.dtype}"
            for axis, size in zip(spec.shape, tensor.shape, strict=False):
                if isinstance(axis, int):
                    fits &= size == axis
                else:  # a named axis has the same size in all inputs
                    fits &= size == sizes.setdefault(axis, size)
                    fits &= axis not in signature.axes or size in signature.bounds(axis)
            if not fits:
                expected = [
                    f"{axis} of {signature.axes[axis]}" if axis in signature.axes else str(axis)
                    for axis in spec.shape
                ]
                raise ValueError(
                    f"input {spec.name} is {tensor.dtype} {list(tensor.shape)}, expected "
                    f"{spec.dtype} [{', '.join(expected)}]"
                )
        return run(*inputs)

    return run_checked


def in_parts(
    run: Callable[..., Tensors], signature: Signature, largest: int
) -> Callable[..., Tensors]:
    """Return a function that runs at most `largest` samples at once, on the first axis."""
    batched = [spec.shape[:1] == (signature.batch_axis,) for spec in signature.inputs]

    def run_in_parts(*inputs: torch.Tensor) -> Tensors:
        rows, outputs = len(inputs[0]), []
        for start in range(0, max(rows, 1), largest):
            part = slice(start, start + largest)
            outputs.append(
                run(*(x[part] if b else x for x, b in zip(inputs, batched, strict=True)))
            )
        return tuple(torch.cat(column) for column in zip(*outputs, strict=True))

    return run_in_parts
