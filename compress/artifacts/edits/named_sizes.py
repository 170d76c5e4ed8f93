"""Sizes that a module's code computes become attributes, so that pruning can change them.

``y.view(B, T, C)`` fits no sliced ``y`` if ``C`` is the width of another tensor. A copy of the
method says ``y.view(B, T, self.view_size_0)``, and the module, which becomes an instance of a
subclass of its class, holds the number.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import linecache
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import Field

from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid

if TYPE_CHECKING:
    from torch import nn

    Sizes = Mapping[str, Mapping[str, int | tuple[int, ...]]]

SHAPED = ("view", "reshape", "unflatten", "expand")  # calls that take the shape of their result
PARTED = ("split", "chunk")
"""Calls that take the sizes, or the number, of the parts of an axis; both become `split`."""
INDEX = "__getitem__"
SizedExpression: TypeAlias = ast.Call | ast.Subscript
FUTURE_ANNOTATIONS = annotations.compiler_flag
# It becomes part of code that is compiled.
NamedSize = Annotated[str, Field(pattern=r"^[a-z]+_sizes?_[0-9]+$")]
"""An attribute that holds a size, such as ``view_size_0``."""


class NamedCall(Settings):
    """A call in a method's source some of whose sizes become attributes of the module."""

    method: str
    source: str
    """The call as ``ast.unparse`` writes it."""
    occurrence: int = 0
    """The number of calls before it in the method that read the same."""
    attributes: dict[int, NamedSize]
    """Index of a size among those that the call takes → attribute."""


def name_sizes_(module: nn.Module, calls: Sequence[NamedCall], sizes: Sizes) -> None:
    """Replace one class's methods to read sizes that are set here; ArtifactInvalid: other code."""
    classes: dict[type, type] = {}
    for name, values in sizes.items():
        part = module.get_submodule(name)
        kind: Any = type(part)
        if kind not in classes:
            methods = {
                method: _with_names(kind, method, [c for c in calls if c.method == method])
                for method in dict.fromkeys(call.method for call in calls)
            }
            known = (*getattr(kind, "named_sizes", ()), *values)
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            members = {**names, "named_sizes": known, **methods}
            classes[kind] = type(kind.__name__, (kind,), members)
        # As CallByName does: a wrapping module would rename every parameter.
        part.__class__ = classes[kind]
        for attribute, value in values.items():
            setattr(part, attribute, value)


def method_source(kind: type, method: str, code: CodeType) -> ast.FunctionDef | None:
    """Return a method's syntax tree; None without source, or if ``code`` is a decorator's."""
    function = inspect.getattr_static(kind, method, None)
    if not isinstance(function, FunctionType) or function.__code__ is not code:
        return None
    tree = _definition(function)
    nodes = ast.walk(tree) if tree is not None else ()
    names = [getattr(node, "id", None) or getattr(node, "attr", None) or "" for node in nodes]
    # Names that Python changes within a class, such as ``__size``.
    is_private = any(name.startswith("__") and not name.endswith("__") for name in names)
    return None if is_private else tree


def sizes_of(call: SizedExpression) -> list[ast.expr] | None:
    """Return a call's sizes, sizes of parts or slice bounds; None if not written one by one."""
    if isinstance(call, ast.Subscript):
        bounds = [b for part in slices_of(call) for b in (part.lower, part.upper) if b is not None]
        return bounds or None
    if not isinstance(call.func, ast.Attribute):
        return None
    if call.keywords and call.func.attr in SHAPED:
        return None
    value = call.func.value
    is_function = isinstance(value, ast.Name) and value.id == "torch"
    given = call.args[is_function:]
    if call.func.attr in PARTED:
        is_one = bool(given) and not isinstance(given[0], ast.Starred)
        return [given[0]] if is_one else None
    if call.func.attr == "unflatten":
        given = given[1:]
    if len(given) == 1 and isinstance(given[0], ast.Tuple | ast.List):
        given = given[0].elts
    is_unpacked_whole = len(given) == 1 and isinstance(given[0], ast.Starred | ast.Name)
    return None if call.func.attr not in (*SHAPED, *PARTED) or is_unpacked_whole else given


def slices_of(index: ast.Subscript) -> list[ast.Slice]:
    """Return the slices of an index; none if it has more than slices and an ellipsis."""
    parts = index.slice.elts if isinstance(index.slice, ast.Tuple) else [index.slice]
    if any(not (isinstance(part, ast.Slice) or ast.unparse(part) == "...") for part in parts):
        return []
    return [part for part in parts if isinstance(part, ast.Slice)]


def calls_in(tree: ast.AST) -> Iterator[SizedExpression]:
    """Yield the calls and indices of a method that take sizes, in the order of the source."""
    expressions = (node for node in ast.walk(tree) if isinstance(node, ast.Call | ast.Subscript))
    found = [node for node in expressions if sizes_of(node)]
    yield from sorted(found, key=lambda node: (node.end_lineno, node.end_col_offset))


def occurrence_of(call: SizedExpression, tree: ast.AST) -> tuple[str, int]:
    """Return the source text of a call, and the number of calls before it that read the same."""
    text = ast.unparse(call)
    alike = [other for other in calls_in(tree) if ast.unparse(other) == text]
    return text, alike.index(call)


def _with_names(kind: type, method: str, calls: Iterable[NamedCall]) -> FunctionType:
    function = inspect.getattr_static(kind, method, None)
    source = _definition(function) if isinstance(function, FunctionType) else None
    if source is None:
        raise ArtifactInvalid(f"{kind.__qualname__}.{method}: its source is not there")
    tree = copy.deepcopy(source)
    own = tree.args.args[0].arg
    known = {occurrence_of(call, tree): call for call in calls_in(tree)}
    for named in calls:
        call = known.get((named.source, named.occurrence))
        if call is None:
            raise ArtifactInvalid(
                f"{kind.__qualname__}.{method}: expected the call {named.source!r}, in which a "
                "size was replaced when the model was pruned, and it is not there; load the model "
                "with the code with which it was pruned"
            )
        _replace_sizes_(call, own, named.attributes)
    assert isinstance(function, FunctionType)
    return _compiled(tree, function)


def _replace_sizes_(call: SizedExpression, own: str, attributes: Mapping[int, str]) -> None:
    sizes = sizes_of(call) or []
    names: dict[ast.AST, ast.expr] = {
        sizes[index]: ast.Attribute(ast.Name(own, ast.Load()), attribute, ast.Load())
        for index, attribute in attributes.items()
    }
    if isinstance(call, ast.Subscript):
        for part in slices_of(call):
            part.lower = names.get(part.lower, part.lower) if part.lower else None
            part.upper = names.get(part.upper, part.upper) if part.upper else None
        return
    sequences = (a.elts for a in call.args if isinstance(a, ast.Tuple | ast.List))
    for values in (call.args, *sequences):
        values[:] = [names.get(value, value) for value in values]
    if isinstance(call.func, ast.Attribute) and call.func.attr == "chunk":
        call.func.attr = "split"


def _compiled(tree: ast.FunctionDef, function: FunctionType) -> FunctionType:
    """Compile a changed definition as a function with the surroundings of the original."""
    # Within a function that has the variables of the original's closure, such as `__class__`.
    tree.decorator_list = []
    free = ", ".join(function.__code__.co_freevars)
    body = "\n".join(f"    {line}" for line in ast.unparse(tree).splitlines())
    text = f"def enclosing({free}):\n{body}\n"
    # Shown in tracebacks, and read by torch.jit.script.
    file = f"<{function.__qualname__} with named sizes {zlib.crc32(text.encode()):08x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    # Only the code is taken, so that neither defaults nor annotations are evaluated again.
    flags = function.__code__.co_flags & FUTURE_ANNOTATIONS
    outer = _code_in(compile(text, file, "exec", flags, dont_inherit=True), "enclosing")
    code = _code_in(outer, function.__code__.co_name)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    new = FunctionType(
        code.replace(co_qualname=function.__code__.co_qualname),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells[name] for name in code.co_freevars),
    )
    functools.update_wrapper(new, function)
    del new.__wrapped__  # type: ignore[attr-defined]  # inspect would find the original's source
    new.__kwdefaults__ = function.__kwdefaults__
    return new


def _code_in(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)


def _definition(function: FunctionType) -> ast.FunctionDef | None:
    code = function.__code__
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    try:
        tree = _parsed(text)
    except SyntaxError:  # the file was changed since it was imported
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno and node.args.args:
                return node
    return None


@functools.lru_cache(maxsize=16)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)
