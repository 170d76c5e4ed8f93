"""Read and write ``.mar`` files: zip archives that TorchServe unpacks onto Python's path.

Equal members give equal bytes, unlike with ``torch-model-archiver``. The handler is one file with
one class: the modules of `compress.serve.worker`, as this package is not installed where it runs.
"""

from __future__ import annotations

import ast
import importlib.machinery
import io
import json
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from compress.checkpoint.safe_zip import refuse_unsafe
from compress.common.atomic_files import stays_inside
from compress.common.errors import ArtifactInvalid, raised_as

HANDLER = "handler.py"
CONFIG = "model-config.yaml"
MAR_MANIFEST = "MAR-INF/MANIFEST.json"
MODULES = (
    "compress.checkpoint.pt2_safety",
    "compress.common.foreign.native_runtimes",
    "compress.export.common.int8_sums",
    "compress.serve.worker.tensors",
    "compress.serve.worker.wire",
    "compress.serve.worker.loaders",
    "compress.serve.worker.handler",
)
"""In dependency order: each uses only modules before it."""


def mar_manifest(model_name: str, payload: str) -> bytes:
    """Return the archive's manifest for TorchServe."""
    # The order of the keys is a part of the archive's bytes, and the date is fixed as each
    # member's is, so that equal contents give equal bytes.
    model = {"modelName": model_name, "serializedFile": payload, "handler": HANDLER}
    model |= {"modelVersion": "1.0", "configFile": CONFIG}
    manifest = {"createdOn": "01/01/1980 00:00:00", "runtime": "python", "model": model}
    return json.dumps(manifest | {"archiverVersion": "0.12.0"}, indent=2).encode()


def write_mar(path: Path, members: Mapping[str, bytes | Path]) -> None:
    """Write an archive of members (bytes, or files to copy), sorted and uncompressed."""
    for name in members:
        check_member_name(name)
    # Stored and sorted, with fixed dates, so that equal members give equal bytes.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(members.items()):
            entry = zipfile.ZipInfo(name)  # of 1980
            entry.create_system = 3  # Unix, on every platform
            entry.external_attr = 0o100644 << 16  # a regular file
            source = io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")
            entry.file_size = len(content) if isinstance(content, bytes) else content.stat().st_size
            with source, archive.open(entry, "w") as target:
                shutil.copyfileobj(source, target)


def read_mar(path: Path) -> dict[str, bytes]:
    """Return every member's bytes; ArtifactInvalid for unsafe names, sizes or checksums."""
    with (
        raised_as(ArtifactInvalid, f"{path}: not a readable .mar"),
        zipfile.ZipFile(path) as archive,
    ):
        refuse_unsafe(archive, path)
        names = archive.namelist()
        for name in names:
            check_member_name(name, str(path))
        return {name: archive.read(name) for name in names}


@contextmanager
def unpacked(members: Mapping[str, bytes]) -> Iterator[Path]:
    """Write what `read_mar` returned into `model` in a temporary folder, and yield it."""
    with TemporaryDirectory(prefix="compress-mar-") as temporary:
        folder = Path(temporary) / "model"
        for name, content in members.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        yield folder


def model_name_of(path: Path) -> str:
    """Return the name under which TorchServe serves an archive, from its manifest."""
    what = f"{path}: not a .mar with a {MAR_MANIFEST}"
    with raised_as(ArtifactInvalid, what), zipfile.ZipFile(path) as archive:
        refuse_unsafe(archive, path)
        return str(json.loads(archive.read(MAR_MANIFEST))["model"]["modelName"])


def check_member_name(name: str, archive: str = "the .mar") -> None:
    """Raise ArtifactInvalid for a name that leaves the folder, or is that of a Python module."""
    if not stays_inside(name):
        raise ArtifactInvalid(f"{archive}: member {name!r} is not a plain relative path")
    # TorchServe puts the archive's folder first on Python's path: an onnxruntime.py in it would be
    # imported instead of the library.
    suffixes = tuple(importlib.machinery.all_suffixes())
    if name != HANDLER and PurePosixPath(name).name.endswith(suffixes):
        raise ArtifactInvalid(
            f"{archive}: member {name!r} is a Python module and would shadow an installed one; "
            f"only {HANDLER} may be code"
        )


def handler_text() -> bytes:
    """Return the source of the handler, reproducibly."""
    docs, imports, bodies = [], set[str](), []
    for module in MODULES:
        package, _, name = module.rpartition(".")
        source = files(package).joinpath(f"{name}.py").read_text("utf-8")
        tree = ast.parse(source)
        docs.append(str(ast.get_docstring(tree)))
        dropped = set[int]()  # the docstring, imports and the `if TYPE_CHECKING` block
        for i, node in enumerate(tree.body):
            if i == 0 or isinstance(node, ast.Import | ast.ImportFrom | ast.If):
                dropped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            bundled = isinstance(node, ast.ImportFrom) and node.module in ("__future__", *MODULES)
            if isinstance(node, ast.Import | ast.ImportFrom) and not bundled:
                imports.add(ast.unparse(node))
        lines = enumerate(source.splitlines(), start=1)
        bodies.append("\n".join(line for number, line in lines if number not in dropped).strip())
    text = "\n\n".join(docs)
    parts = [f'"""{text}\n"""\n', "from __future__ import annotations\n", *sorted(imports), "\n"]
    return ("\n".join(parts) + "\n\n\n".join(bodies) + "\n").encode()
