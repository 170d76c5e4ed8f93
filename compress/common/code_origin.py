"""Tells the user's own code from installed packages, and what a module's name stands for."""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import os
import sys
import sysconfig
from contextlib import suppress
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Literal

OWN_PACKAGE = "compress"
"""Of this toolkit: its modules are never user code, even if user code lies in the same folder."""
_STANDARD = Path(sysconfig.get_path("stdlib")).resolve()
_STANDARD_LIBRARY = (
    str(_STANDARD),
    str(_STANDARD.with_name("python{}{}.zip".format(*sys.version_info))),  # first on sys.path
)
_PACKAGE = Path(__file__).resolve().parents[1]
# In a clone some of its folders are links to those beside it.
_OWN = tuple(str(each.resolve()).removesuffix(".py") for each in _PACKAGE.iterdir())
_LOADERS = tuple(
    str(_PACKAGE / "common" / f"{name}.py")
    for name in ("code_origin", "dependency_recorder", "factories")
)
"""Files of this toolkit between the user's code and what it imports or opens, on the stack."""
_SEARCH = tuple(sys.path)
"""Where a fresh process looks for modules: user code may extend `sys.path` while it runs."""


@lru_cache(maxsize=65_536)
def origin_of(filename: str) -> Literal["user", "own", "other"]:
    """Classify a source file: user code, this toolkit's own, or another library's."""
    if filename.startswith("<"):  # generated code, such as the methods of dataclasses
        return "other"
    path = os.path.realpath(filename)
    if path in _LOADERS or is_installed(path):
        return "other"
    return "own" if is_below(path.removesuffix(".py"), _OWN) else "user"


def is_installed(path: str) -> bool:
    """Whether a file is the standard library's, or that of an installed package, wherever it lies.

    That is a file in a `site-packages` folder, of any environment, or one that the metadata beside
    it name, as in a folder of `pip install --target`; not the sources of editable installs.
    """
    return is_below(path, _STANDARD_LIBRARY) or _folder_of_packages(path) is not None


def is_below(path: str, folders: tuple[str, ...]) -> bool:
    """Whether a path is one of some folders, or lies in one."""
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


def find_below(module_name: str, root: Path) -> Path | None:
    """Return the source file of a module below a folder; None for namespace packages."""
    place = root.absolute()
    path: Path | None = None
    for part in module_name.split("."):
        spec = PathFinder.find_spec(part, [str(place)])
        origin = spec.origin if spec else None
        path = Path(origin) if origin and origin.endswith(".py") else None
        if spec is None or (path is None and origin is not None):
            return None
        place = place / part
    return path


def locate(module_name: str, code: Path) -> tuple[str, str | None] | None:
    """Return the package that a module's name stands for, and the file that begins it.

    It is looked for as by a fresh process: among the user's modules in `code`, then on the path.
    The package is the name up to the first part that is more than a folder. The file is None where
    there is no such module; the result, for one of the standard library or of this toolkit.
    """
    parts, places = module_name.split("."), None
    if parts[0] == OWN_PACKAGE or parts[0] in sys.stdlib_module_names:
        return None
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        own = find_below(name, code)
        spec = _find_spec(name, places) if own is None and (places or count == 1) else None
        file = str(own) if own else spec.origin if spec else None
        if file:
            return name, file
        places = spec.submodule_search_locations if spec else None
    return parts[0], None


def name_of(path: str) -> str:
    """Return the dotted name of an installed module, given its source file."""
    folder = _folder_of_packages(os.path.realpath(path)) or _STANDARD
    name = os.path.relpath(os.path.realpath(path), folder).removesuffix(".py")
    return name.replace(os.sep, ".").removesuffix(".__init__")


@cache
def identify(file: str) -> str:
    """Return the distribution and version that an installed file belongs to.

    A distribution that no index serves, such as one of a folder or a git repository, changes
    without a new version: its files' hashes are part of it. Without one it is the file's hash.
    """
    path = os.path.realpath(file)
    folder = str(_folder_of_packages(path) or Path(path).parent)
    name, found, record = os.path.relpath(path, folder), None, ""
    for distribution in importlib.metadata.distributions(path=[folder]):
        files = distribution.read_text("RECORD") or ""
        if f"\n{name}," in f"\n{files}":
            found, record = distribution, files
            break
        if (distribution.metadata["Name"] or "").lower() == name.partition(os.sep)[0].lower():
            found = distribution  # Debian's have no record
    if found is None:
        return f"sha256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]}"
    version = f"{found.metadata['Name']} {found.version}"
    if found.read_text("direct_url.json") is None:
        return version
    # pip's own lines, and those of scripts, name this environment.
    lines = [x for x in record.splitlines() if ".dist-info/" not in x and not x.startswith("..")]
    return f"{version} ({hashlib.sha256(repr(lines).encode()).hexdigest()[:16]})"


def _find_spec(name: str, places: Any) -> ModuleSpec | None:
    for finder in sys.meta_path:
        # This toolkit's own finds the modules of the pipeline that ran last.
        if type(finder).__module__.partition(".")[0] != OWN_PACKAGE:
            search = [*_SEARCH] if finder is PathFinder and places is None else places
            if spec := finder.find_spec(name, search):
                return spec
    return None


def _folder_of_packages(path: str) -> Path | None:
    """Return the folder that a file's package is installed in; None for a file of no package."""
    file = Path(path)
    folder = _folder_around(file.parent)
    if folder is None and Path(file.name) in _recorded(file.parent):
        return file.parent
    return folder


@lru_cache(maxsize=4096)
def _folder_around(package: Path) -> Path | None:
    around = (package, *package.parents)
    for folder in around:
        # Where pip, conda and Linux distributions install packages into. First, as reading all
        # their records takes half a second.
        if folder.name in ("site-packages", "dist-packages"):
            return folder
    return next((each for each in around if package.relative_to(each) in _recorded(each)), None)


@cache
def _recorded(folder: Path) -> frozenset[Path]:
    """Return the modules and the folders in a folder that the records of packages name."""
    found: set[Path] = set()
    with suppress(OSError):
        for file in folder.glob("*.dist-info/RECORD"):
            names = {row[0] for row in csv.reader(file.read_text("utf-8").splitlines()) if row}
            found |= {Path(n) if "/" not in n else Path(n).parent for n in names}
    return frozenset(found)
