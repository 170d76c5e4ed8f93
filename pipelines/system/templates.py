"""Renders the templates of `pipelines/templates`: self-contained pages, YAML, shell scripts."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.pipelines.system.yaml_core import dump_on_one_line

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def render_template(template: str, **names: Any) -> str:
    """Render a template; values are escaped in pages, which end in `.html.jinja`."""
    return _environment(template.endswith(".html.jinja")).get_template(template).render(**names)


@cache
def _environment(is_html: bool) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1] / "templates"),
        undefined=StrictUndefined,  # a name that nobody passes is an error, not an empty text
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not is_html,
        autoescape=is_html,
    )
    environment.globals["outlined"] = outlined
    environment.filters.update(
        bytes=readable_bytes, count=readable_count, breakable=breakable, yaml=dump_on_one_line
    )
    return environment


def outlined(body: Markup) -> tuple[Markup, list[tuple[str, Markup]]]:
    """Return a page's body with an id in each `<h2>`, and the ids with the headings' texts."""
    from markupsafe import Markup

    parts = re.split(r"<h2>(.*?)</h2>", body)
    ids = [re.sub(r"\W+", "-", text.lower()).strip("-") for text in parts[1::2]]
    headings = list(zip(ids, map(Markup, parts[1::2]), strict=True))
    parts[1::2] = [f'<h2 id="{name}">{text}</h2>' for name, text in headings]
    return Markup("".join(parts)), headings


def breakable(name: str) -> Markup:
    """Return a name as HTML with `<wbr>` after separators, where alone it may wrap."""
    from markupsafe import Markup, escape

    marks = "-/" if "-" in name else "._/:"  # a branch is named `stage-setting=value`
    return Markup(re.sub(rf"([{marks}])(?=\w)", r"\1<wbr>", str(escape(name))))


def readable_bytes(value: int) -> str:
    """Format a size in B, kB or MB (powers of 1000)."""
    if value < 1000:
        return f"{value} B"
    return f"{value / 1e3:.0f} kB" if value < 1e6 else f"{value / 1e6:.2f} MB"


def readable_count(value: int | None) -> str:
    """Format a count with k, M or G; a dash for None."""
    if value is None:
        return "–"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return str(value)
