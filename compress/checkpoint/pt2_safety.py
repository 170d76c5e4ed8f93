"""Finds what could run code in a ``torch.export`` file before torch reads it.

``torch.export.load`` is built for trusted files: it unpickles sample inputs, tensors and constants,
loads compiled libraries that lie in the archive, and turns strings of the graph (guards, shape
expressions, names) into Python source that it executes.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.export.pt2_archive import PT2ArchiveReader

GRAPH = "models/model.json"
SAMPLE_INPUTS = "data/sample_inputs/model.pt"
TENSOR_LISTS = (
    "data/weights/model_weights_config.json",
    "data/constants/model_constants_config.json",
)
RECORD = re.compile(
    r"models/model\.json|data/sample_inputs/model\.pt|data/weights/(weight_\d+|model_weights_config"
    r"\.json)|data/constants/(tensor_\d+|model_constants_config\.json)|archive_format|"
    r"archive_version|byteorder|\.data/(version|serialization_id)"
)
OPERATOR = re.compile(
    r"torch\.ops\.(aten(?!\.from_file\b)|prims|quantized_decomposed|torchao|higher_order)"
    r"(\.\w+){1,2}"
    r"|_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|pow|neg|eq|ne|lt|le|gt|ge|and_|or_)"
    r"|torch\.sym_(int|float|max|min|not|ite|sqrt|sum)|math\.(ceil|floor|trunc)"
)
# Without parentheses, brackets and spaces: as Python source it could call nothing.
WORD = re.compile(r"[\w.+-]*", re.ASCII)
# A size with bounds: a symbol, or a multiple of one, which torch looks up and does not evaluate.
BOUNDED_SIZE = re.compile(r"(\d+\*)?\w*( [+-] \d+)?", re.ASCII)
SHAPE_FUNCTION = re.compile(
    r"Symbol|Integer|Float|Rational|Add|Mul|Pow|Max|Min|And|Or|Not|Equality|Unequality|"
    r"LessThan|StrictLessThan|GreaterThan|StrictGreaterThan|FloorDiv|CleanDiv|CeilDiv|"
    r"IntTrueDiv|FloatTrueDiv|Mod|PythonMod|ModularIndexing|Where|PowByNatural|FloatPow|"
    r"LShift|RShift|ToFloat|TruncToInt|FloorToInt|CeilToInt|RoundToInt"
)


def find_code(archive: PT2ArchiveReader) -> Iterator[str]:
    """Describe what could run code when torch loads an archive: pickles, libraries, source."""
    names = archive.get_file_names()
    for name in names:
        if not RECORD.fullmatch(name):
            yield f"holds {name!r}, expected a graph and plain tensors alone"
    if archive.read_bytes(SAMPLE_INPUTS):
        yield "holds pickled sample inputs"
    for listing in TENSOR_LISTS:
        for name, entry in json.loads(archive.read_bytes(listing))["config"].items():
            folder = PurePosixPath(listing).parent
            if entry["use_pickle"] or (folder / entry["path_name"]).as_posix() not in names:
                yield f"tensor {name!r} is pickled"
            yield from _code_in({name: entry}, "")
    graph = json.loads(archive.read_bytes(GRAPH))
    if graph.get("guards_code"):
        yield "holds guards, which are Python source"
    yield from _code_in(graph, "")


def _code_in(value: Any, key: str) -> Iterator[str]:
    """Yield every string of a JSON value that is not a word, operator, shape or tree spec."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _code_in(name, "range_constraints" if key == "range_constraints" else "")
            yield from _code_in(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _code_in(item, key)
    elif isinstance(value, str) and not _is_plain(value, key):
        yield f"{key or 'a name'} is {value[:80]!r}, which could run code"


def _is_plain(text: str, key: str) -> bool:
    if key == "target":
        return OPERATOR.fullmatch(text) is not None
    if key == "expr_str":
        return _is_shape_expression(text)
    if key in ("in_spec", "out_spec"):
        return _is_tree_of_builtins(json.loads(text)[1])
    if key == "range_constraints":
        return BOUNDED_SIZE.fullmatch(text) is not None
    if key == "as_string":
        return True  # an operator's argument: torch writes it with repr() and never evaluates it
    if key in ("name", "as_name", "forward_arg_names"):
        return text.isidentifier() or not text
    return WORD.fullmatch(text) is not None


def _is_shape_expression(text: str) -> bool:
    """Whether sympy, which evaluates the text as Python, would only build an expression."""
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.Call):
            if not (isinstance(node.func, ast.Name) and SHAPE_FUNCTION.fullmatch(node.func.id)):
                return False
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and not WORD.fullmatch(node.value):
                return False
        elif isinstance(node, ast.Name):
            if not SHAPE_FUNCTION.fullmatch(node.id):
                return False
        elif not isinstance(node, ast.Expression | ast.keyword | ast.Load | ast.UnaryOp | ast.USub):
            return False
    return True


def _is_tree_of_builtins(spec: dict[str, Any]) -> bool:
    """Whether a tree spec names only tuples, lists and dicts; others import what they name."""
    context = json.loads(spec["context"] or "null")
    keys = context if isinstance(context, list) else []
    return (
        spec["type"] in (None, "builtins.tuple", "builtins.list", "builtins.dict")
        and (context is None or isinstance(context, list))
        and all(isinstance(k, str) and WORD.fullmatch(k) for k in keys)
        and all(_is_tree_of_builtins(child) for child in spec["children_spec"])
    )
