"""No circle of modules, imports counted that an import statement does not show.

import-linter sees statements. A module can also name another by `import_module("…")`, or describe
its only class by a Protocol where importing it would close a circle.
"""

import ast
from collections.abc import Collection, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import networkx as nx
import pytest

from compress.artifacts.kinds import ENTRY_POINT_GROUP, LOADED
from compress.core.stage import members_of
from compress.pipelines.config.registry import stages

ROOT = Path(__file__).parents[1]


def _module(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "compress" else ("compress", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """The syntax of every module of the source."""
    roots = [ROOT / name for name in ("compress", "export", "serve", "pipelines")]
    files = [f for root in roots for f in root.rglob("*.py") if not f.is_symlink()]
    return {_module(file): ast.parse(file.read_text()) for file in [*files, ROOT / "cli.py"]}


def _texts(node: ast.AST, constants: dict[str, ast.expr]) -> Iterator[str]:
    """Yield the strings that an expression may be, through module-level constants."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
        elif isinstance(part, ast.Name) and part.id in constants:
            yield from _texts(constants.pop(part.id), constants)


def named_imports(tree: ast.Module) -> set[str]:
    """Return the modules that a module imports by constant names, its tables of names included."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node.args
        and (getattr(node.func, "attr", "") or getattr(node.func, "id", ""))
        in ("import_module", "__import__")
    ]
    found = {text for call in calls for text in _texts(call.args[0], dict(constants))}
    return {text for text in found if text.partition(".")[0] == "compress"}


def _members(node: ast.ClassDef) -> set[str]:
    """Return the names that a class declares, those that `__init__` assigns included."""
    names = set()
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef):
            names.add(part.name)
        elif isinstance(part, ast.AnnAssign | ast.Assign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            names |= {t.id for t in targets if isinstance(t, ast.Name)}
            names |= {t.attr for t in targets if isinstance(t, ast.Attribute)}
    return names


def stand_ins(trees: dict[str, ast.Module]) -> dict[tuple[str, str], str]:
    """Return Protocols that one class alone fulfils: (module, name) → the module of that class.

    A Protocol of several classes, of functions, or of what users bring is no import in disguise.
    """
    classes = [
        (module, node)
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    members = {(module, node.name): _members(node) for module, node in classes}
    of_name: dict[str, list[set[str]]] = {}
    for (_, name), own in members.items():
        of_name.setdefault(name, []).append(own)
    for module, node in classes:  # what the bases in the source declare, one level
        for base in map(ast.unparse, node.bases):
            for own in of_name.get(base.partition("[")[0], ()):
                members[module, node.name] |= own
    protocols = {
        (module, node.name): _members(node)
        for module, node in classes
        if any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)
    }
    found = {}
    for protocol, wanted in protocols.items():
        if not wanted or wanted <= {"__call__"}:
            continue
        fulfil = [key for key, own in members.items() if wanted <= own and key not in protocols]
        if len({name for _, name in fulfil}) == 1 and fulfil[0][0] != protocol[0]:
            found[protocol] = fulfil[0][0]
    return found


def _statements(tree: ast.Module, known: Collection[str]) -> set[str]:
    """Return the modules of the source that import statements name, those for types included."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (whole & {*known}) or {node.module}
    return names & {*known}


def circles(trees: dict[str, ast.Module], hidden: dict[str, set[str]]) -> list[set[str]]:
    """Return the circles of modules that import each other, hidden edges counted."""
    graph = nx.DiGraph()
    for module, tree in trees.items():
        imported = _statements(tree, trees) | (hidden.get(module, set()) & {*trees})
        graph.add_edges_from((module, other) for other in imported - {module})
    return [found for found in nx.strongly_connected_components(graph) if len(found) > 1]


def test_no_circle_is_hidden_behind_a_name_or_a_protocol(trees: dict[str, ast.Module]) -> None:
    hidden = {module: named_imports(tree) for module, tree in trees.items()}
    for (module, _), other in stand_ins(trees).items():
        hidden[module] = hidden[module] | {other}
    assert circles(trees, hidden) == []


def test_hidden_imports_are_found() -> None:
    code = """
from importlib import import_module
TABLE = {"a": "compress.export.onnx.stage", "b": "torch"}
import_module("compress.pipelines.api"), import_module(TABLE[name]), import_module(name)
"""
    assert named_imports(ast.parse(code)) == {
        "compress.pipelines.api",
        "compress.export.onnx.stage",
    }
    below = "class Found(Protocol):\n    size: int\n    def measure(self): ..."
    above = (
        "class Search:\n    def __init__(self):\n        self.size = 1\n    def measure(self): ..."
    )
    source = {"compress.low": ast.parse(below), "compress.high": ast.parse(above)}
    assert stand_ins(source) == {("compress.low", "Found"): "compress.high"}
    source["compress.other"] = ast.parse(above.replace("Search", "Other"))
    assert stand_ins(source) == {}, "two classes fulfil it"


def test_every_kind_of_artifact_is_announced() -> None:
    written = {kind for stage in stages().values() for kind in members_of(stage.writes())}
    announced = {entry.name: entry.load() for entry in entry_points(group=ENTRY_POINT_GROUP)}
    own = {
        kind: found for kind, found in LOADED.items() if found.__module__.startswith("compress.")
    }
    assert {kind.kind for kind in written} <= own.keys()
    assert announced == own
