"""Reads and writes YAML by the core schema of YAML 1.2, whose numbers are those of JSON and Python.

PyYAML reads YAML 1.1, in which `1e-6` is text, `010` is 8, `1:30` is 90 and `no` is false.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

PREFIX = "tag:yaml.org,2002:"
MERGE = f"{PREFIX}merge"
NUMBER = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
PATTERNS = {
    "null": ("~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": ("true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": ("[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (rf"{NUMBER}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.0123456789")),
    "merge": ("<<", ["<"]),
}
"""Kind of a plain scalar → what it matches whole, and the characters that it begins with."""


class Loader(yaml.SafeLoader):
    """Reads only what JSON has too, and merges; a date is text."""

    yaml_implicit_resolvers = {}

    def construct_int(self, node: yaml.ScalarNode) -> int:
        """Return an integer; zeros before a decimal one mean nothing."""
        text = self.construct_scalar(node)
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else."""


for _kind, (_pattern, _first) in PATTERNS.items():
    for _class in (Loader, _Dumper):
        _class.add_implicit_resolver(f"{PREFIX}{_kind}", re.compile(f"(?:{_pattern})$"), _first)
Loader.add_constructor(f"{PREFIX}int", Loader.construct_int)


def load(text: str) -> Any:
    """Return the content of a document that comes from this toolkit or was checked before."""
    return yaml.load(text, Loader)


def dump(value: Any, **options: Any) -> str:
    """Return a value as a document, with the order of its keys."""
    options = {"sort_keys": False, "allow_unicode": True, **options}
    return str(yaml.dump(value, Dumper=_Dumper, **options))


def dump_on_one_line(value: Any) -> str:
    """Return a value on one line, without the end of a document."""
    text = dump(value, default_flow_style=True, width=10**6)
    # PyYAML ends a document that is a plain scalar with `...`.
    return text.removesuffix("\n").removesuffix("\n...")
