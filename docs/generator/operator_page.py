"""The page of ONNX operators that become PyTorch's."""

from itertools import groupby

from onnx import defs

from compress.graph.from_onnx.module import LAYERS
from compress.graph.from_onnx.registry import OPERATORS

TITLE = """# ONNX operators

<!-- Written by docs/generator/reference.py; edit compress/graph/from_onnx. -->

What becomes of the operators of a file when it is
[imported as a module](../models.md#onnx-files). The numbers are the operator sets that changed an
operator; forms of it that are refused, such as `Scan` of operator set 8, are named in one line.
`Attention` of four axes without earlier keys is one function, too.
"""


def how_imported(schema: defs.OpSchema) -> str:
    """Return what an operator becomes, in words."""
    if schema.name in LAYERS:
        return "a layer where its weights or sizes are constants, else a function"
    if schema.name in OPERATORS:
        return "a function"
    if schema.has_function or schema.has_context_dependent_function:
        return "the operators that ONNX defines it by"
    return "refused"


def operators_page() -> str:
    """Return the page's Markdown."""
    schemas = [s for s in defs.get_all_schemas_with_history() if not s.domain]
    schemas.sort(key=lambda schema: (schema.name, schema.since_version))
    lines = [TITLE, "| operator | changed in | becomes |", "|---|---|---|"]
    counts: dict[str, int] = {}
    for name, versions in groupby(schemas, lambda schema: schema.name):
        *_, last = known = [*versions]
        if last.deprecated and name not in OPERATORS:
            continue
        numbers = ", ".join(str(schema.since_version) for schema in known)
        how = how_imported(last)
        counts[how] = counts.get(how, 0) + 1
        lines.append(f"| `{name}` | {numbers} | {how} |")
    total = ", ".join(f"{count} become {how}" for how, count in sorted(counts.items()))
    total = total.replace("become refused", "are refused")
    return "\n".join([*lines, "", f"Of {sum(counts.values())} operators {total}."])
