"""Bundle the modules of the archive's handler into one ``handler.py``.

TorchServe expects one file with one class, and this package is not installed where it runs.
"""

from __future__ import annotations

import ast
from importlib.resources import files

MODULES = (
    "compress.checkpoint.pt2_safety",
    "compress.common.foreign.native_runtimes",
    "compress.export.common.int8_sums",
    "compress.serve.worker.http_errors",
    "compress.serve.worker.tensors",
    "compress.serve.worker.wire",
    "compress.serve.worker.wire",
    "compress.serve.worker.preprocess",
    "compress.serve.worker.loaders",
    "compress.serve.worker.tensors",
    "compress.serve.worker.handler",
)
"""In dependency order: each uses only modules before it."""


def handler_text() -> bytes:
    """Return the source of the handler, reproducibly."""
    sources = [_source(name) for name in MODULES]
    trees = [ast.parse(source) for source in sources]
    docs = "\n\n".join(str(ast.get_docstring(tree)) for tree in trees)
    imports = sorted({line for tree in trees for line in _imports(tree)})
    bodies = []
    for source, tree in zip(sources, trees, strict=True):
        dropped = set[int]()  # the docstring, imports and the `if TYPE_CHECKING` block
        for i, node in enumerate(tree.body):
            if i == 0 or isinstance(node, ast.Import | ast.ImportFrom | ast.If):
                dropped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines = enumerate(source.splitlines(), start=1)
        bodies.append("\n".join(line for number, line in lines if number not in dropped).strip())
    parts = [f'"""{docs}\n"""\n', "from __future__ import annotations\n", *imports, "\n"]
    return ("\n".join(parts) + "\n\n\n".join(bodies) + "\n").encode()


def _source(module: str) -> str:
    package, _, name = module.rpartition(".")
    return files(package).joinpath(f"{name}.py").read_text("utf-8")


def _imports(tree: ast.Module) -> list[str]:
    """Return a module's top-level imports, except those of bundled modules."""
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    return [
        ast.unparse(node)
        for node in imports
        if isinstance(node, ast.Import) or node.module not in ("__future__", *MODULES)
    ]
