"""Notes the files that libraries open by themselves, outside of Python's `open`."""

from __future__ import annotations

import functools
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

READERS = {
    "safetensors": ("safe_open",),
    "torch": ("from_file",),
    "torch.jit": ("load",),
    "torch.export": ("load",),
    "torchvision.io": ("decode_image", "read_file", "read_image", "read_video"),
    "pyarrow": ("input_stream", "memory_map"),
    "pyarrow.csv": ("open_csv", "read_csv"),
    "pyarrow.dataset": ("dataset",),
    "pyarrow.feather": ("read_feather", "read_table"),
    "pyarrow.parquet": (
        "ParquetDataset",
        "ParquetFile",
        "read_pandas",
        "read_schema",
        "read_table",
    ),
    "cv2": ("VideoCapture", "imread"),
    "h5py": ("File",),
    "lmdb": ("Environment", "open"),
}
"""Module → its functions and classes that take the path of a file, or of a folder of files."""


def note_native_readers(note: Callable[[str], None]) -> None:
    """Call a function with each path that is passed to a reader, of modules imported later too."""
    for name in READERS:
        if name in sys.modules:
            _wrap_readers(sys.modules[name], note)
    sys.meta_path.insert(0, _AfterImport(note))


class _AfterImport(MetaPathFinder):
    """Wraps the readers of a module once it has been imported."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        finders = [f for f in sys.meta_path if f is not self] if fullname in READERS else []
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec), None)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _wrap_readers(module, self.note)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap_readers(module: ModuleType, note: Callable[[str], None]) -> None:
    for name in READERS[module.__name__]:
        reader: Any = getattr(module, name, None)
        if reader is None:
            continue
        wrapped: Any = _noted(reader, note)
        if isinstance(reader, type) and isinstance(vars(reader).get("__init__"), FunctionType):
            reader.__init__ = _noted(reader.__init__, note)  # type: ignore[misc]
            continue  # subclasses are noted, too
        if isinstance(reader, type):
            wrapped = _Class(name, (), {"wrapped": staticmethod(wrapped), "reader": reader})
        for other in [*sys.modules.values()]:
            if getattr(other, "__dict__", {}).get(name) is reader:
                setattr(other, name, wrapped)


class _Class(type):
    """Stands for a class that C defines, which cannot be changed."""

    wrapped: Callable[..., Any]
    reader: type

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        return cls.wrapped(*arguments, **keywords)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.reader)


def _noted(reader: Callable[..., Any], note: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(reader)
    def noted(*arguments: Any, **keywords: Any) -> Any:
        for given in (*arguments, *keywords.values()):
            for path in given if isinstance(given, list | tuple) else (given,):
                if isinstance(path, str | os.PathLike) and Path(path).exists():
                    note(os.fsdecode(path))
        return reader(*arguments, **keywords)

    return noted
