"""TorchScript modules: made from eager ones, written byte for byte alike, read, counted."""

from __future__ import annotations

import io
import re
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from compress.core.errors import ArtifactInvalid, StageFailed, first_line
from compress.core.program import with_flat_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from compress.core.signature import Signature

MANGLED = re.compile(rb"___torch_mangle_\d+")
"""How TorchScript tells two classes of one name apart: by a number that counts up per process."""
TEXT = (".py", ".pkl")
SOURCE_LOCATIONS = ".debug_pkl"
VERSIONS = ("version", ".data/version")
WRITTEN_ANYWAY = (*VERSIONS, "byteorder", ".data/serialization_id")


def freeze(
    module: torch.nn.Module, signature: Signature, method: Literal["trace", "script"]
) -> torch.jit.ScriptModule:
    """Return a module in eval mode as TorchScript, its weights constants of the graph.

    Raises:
        StageFailed: TorchScript cannot express the module.
    """
    inputs = signature.example()
    with torch.no_grad(), quiet():
        try:
            scripted: Any
            if method == "script":
                scripted = torch.jit.script(module)
            else:
                flat = with_flat_outputs(module, inputs)
                # The tracer's own check runs the same inputs again; check_agreement does more.
                scripted = torch.jit.trace(flat, inputs, check_trace=False)  # type: ignore[no-untyped-call]  # torch
            frozen: torch.jit.ScriptModule = torch.jit.freeze(scripted)
            return frozen
        except Exception as error:
            other = {"trace": "script", "script": "trace"}[method]
            raise StageFailed(
                f"torch.jit.{method} cannot express the model: {type(error).__name__}: "
                f"{first_line(error)}; try `method: {other}`"
            ) from error


def save(module: torch.jit.ScriptModule, file: Path) -> None:
    """Write a module; equal modules give equal bytes.

    Classes are numbered by appearance, not by how many the process has made before. Source
    locations, which name the author's folders, are left out.

    Raises:
        StageFailed: the module calls what only Python can run.
    """
    buffer = io.BytesIO()
    with quiet():
        try:
            torch.jit.save(module, buffer)
        except RuntimeError as error:
            raise StageFailed(f"torch.jit.save: {first_line(error)}") from error
    buffer.seek(0)
    reader = torch._C.PyTorchFileReader(buffer)
    numbers: dict[bytes, bytes] = {}

    def renumber(match: re.Match[bytes]) -> bytes:
        return numbers.setdefault(match[0], b"___torch_mangle_%d" % len(numbers))

    with file.open("wb") as stream:
        writer = torch._C.PyTorchFileWriter(stream)
        # An older version would have the operators read with the meaning they had then.
        writer.set_min_version(_version(reader))
        for name in reader.get_all_records():
            if name.endswith(SOURCE_LOCATIONS) or name in WRITTEN_ANYWAY:
                continue
            record = reader.get_record(name)
            if name.endswith(TEXT):
                name = MANGLED.sub(renumber, name.encode()).decode()
                record = MANGLED.sub(renumber, record)
            writer.write_record(name, record, len(record))
        writer.write_end_of_file()


def _version(reader: torch._C.PyTorchFileReader) -> int:
    """Return the version of TorchScript's operators that an archive was written for."""
    name = next(n for n in reader.get_all_records() if n in VERSIONS)
    return int(reader.get_record(name))


def load(file: Path, device: str = "cpu") -> Any:
    """Read a module.

    Raises:
        ArtifactInvalid: the file is not TorchScript, or truncated.
    """
    try:
        with quiet():
            return torch.jit.load(file, map_location=device)  # type: ignore[no-untyped-call]  # torch
    except (RuntimeError, ValueError) as error:
        sentence = re.split(r"\n|\. ", str(error).strip())[0]
        raise ArtifactInvalid(f"{file}: not TorchScript, or truncated ({sentence})") from error


def count_weights(module: Any) -> int:
    """Count the elements of a frozen module's tensors, scalars left out."""
    graph = module.inlined_graph  # the nodes live as long as this name does
    constants = [n for n in graph.findAllNodes("prim::Constant") if n.hasAttribute("value")]
    tensors = [n.t("value") for n in constants if n.kindOf("value") == "t"]
    return sum(t.numel() for t in tensors if t.dim())


@contextmanager
def quiet() -> Iterator[None]:
    """Hide torch's deprecations, which the stage logs in one line instead."""
    with warnings.catch_warnings():
        # Of graphs' modules, whose annotations scripting does not need.
        warnings.filterwarnings("ignore", message=r"The TorchScript type system doesn't support")
        # Tensors of quint8 and qint8 are to leave torch after TorchScript.
        warnings.filterwarnings("ignore", message=r"torch\.quantize_per_tensor, .* are deprecated")
        warnings.filterwarnings(
            "ignore", message=r"`torch\.jit\.\w+` is deprecated", category=DeprecationWarning
        )
        yield
