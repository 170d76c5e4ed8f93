"""References to the user's own code: ``module:callable``, looked up beside a file first.

The code that a reference needs is found by reading its import statements, so that it can be hashed
into cache keys and copied into artifacts, which then load again wherever they are carried.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from compress.core.errors import PipelineInvalid

if TYPE_CHECKING:
    from collections.abc import Callable

Reference = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
"""``module:callable``; looked up beside the pipeline file first, then as installed."""

_INSTALLED = tuple(
    Path(sysconfig.get_path(key)).resolve() for key in ("stdlib", "purelib", "platlib")
)


def resolve(reference: str, folder: Path | None = None) -> Callable[..., Any]:
    """Import what ``module:callable`` names.

    Args:
        reference: the module's dotted name, a colon, the callable's name.
        folder: where the user's modules lie; a module found there wins over an installed one.

    Raises:
        PipelineInvalid: the module cannot be imported or has no such callable.
    """
    module_name, _, attribute = reference.partition(":")
    sources = local_sources(reference, folder)
    try:
        module = _import(module_name, folder, sources)
    except Exception as error:
        where = f" (looked in {folder}, then among installed packages)" if folder else ""
        raise PipelineInvalid(
            f"cannot import {module_name!r} for {reference!r}{where}: "
            f"{type(error).__name__}: {error}"
        ) from error
    target: Any = module
    for part in attribute.split("."):
        target = getattr(target, part, None)
    if not callable(target):
        names = [n for n in vars(module) if callable(getattr(module, n)) and not n.startswith("_")]
        raise PipelineInvalid(
            f"{reference!r}: module {module_name!r} ({getattr(module, '__file__', '?')}) has no "
            f"callable {attribute!r}; it has {', '.join(sorted(names)[:12]) or 'none'}"
        )
    return target  # type: ignore[no-any-return]


def local_sources(reference: str, folder: Path | None = None) -> dict[str, Path]:
    """Return the user's own source files that a reference needs, by path relative to their root.

    Installed packages and the standard library are left out: their versions identify them.
    """
    module_name = reference.partition(":")[0]
    root = folder if folder and _find(module_name, folder) else _origin_root(module_name)
    if root is None:
        return {}
    found: dict[str, Path] = {}
    queue = [module_name]
    while queue:
        name = queue.pop()
        for part in _with_parents(name):
            path = _find(part, root)
            if path is None:
                continue
            key = path.relative_to(root.resolve()).as_posix()
            if key not in found:
                found[key] = path
                queue += _imported_names(path, part)
    return dict(sorted(found.items()))


def sources_digest(sources: dict[str, Path]) -> str:
    """Return the SHA-256 of a set of source files, names and contents."""
    digest = hashlib.sha256()
    for name, path in sources.items():
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


_loaded: dict[str, str] = {}
"""Digest of the sources that each of the user's modules was last imported from."""


def _import(module_name: str, folder: Path | None, sources: dict[str, Path]) -> Any:
    digest = sources_digest(sources)
    loaded = sys.modules.get(module_name)
    if loaded is not None and _loaded.get(module_name, digest if not folder else "") == digest:
        return loaded
    # A module of the same name from another folder (each artifact carries its own copy), or from
    # before an edit, gives way; objects made from it live on.
    for key in sources:
        sys.modules.pop(key.removesuffix(".py").removesuffix("/__init__").replace("/", "."), None)
    search = [str(folder.resolve())] if folder is not None and sources else []
    sys.path[:0] = search
    try:
        importlib.invalidate_caches()
        module = importlib.import_module(module_name)
    finally:
        for path in search:
            sys.path.remove(path)
    _loaded[module_name] = digest
    return module


def _find(module_name: str, root: Path) -> Path | None:
    search = [str(root.resolve())]
    path: Path | None = None
    for part in module_name.split("."):
        spec = PathFinder.find_spec(part, search)
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            return None
        path = Path(spec.origin).resolve()
        search = list(spec.submodule_search_locations or [])
    return path


def _origin_root(module_name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module_name.split(".")[0])
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    path = Path(spec.origin).resolve()
    if any(path.is_relative_to(place) for place in _INSTALLED):
        return None
    return path.parent.parent if path.name == "__init__.py" else path.parent


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def _imported_names(path: Path, module_name: str) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return []  # the import itself reports it, with the line
    package = module_name if path.name == "__init__.py" else module_name.rpartition(".")[0]
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            kept = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*filter(None, kept), *([node.module] if node.module else [])])
            names += [base] if base else []
            names += [f"{base}.{alias.name}" if base else alias.name for alias in node.names]
    return names
