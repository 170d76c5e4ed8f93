"""Rendering of self-contained HTML pages (no script, font or image from elsewhere) with Jinja."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from compress.pipelines.system.templates import jinja_environment

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def render_page(template: str, **names: Any) -> str:
    """Render a template of `pipelines/templates`, with HTML escaping."""
    return _environment().get_template(template).render(**names)


@cache
def _environment() -> Environment:
    from compress.pipelines.results.schema import readable_bytes, readable_count

    return jinja_environment(
        autoescape=True, bytes=readable_bytes, count=readable_count, breakable=breakable
    )


def breakable(name: str) -> Markup:
    """Return a name as HTML with `<wbr>` after separators, where alone it may wrap."""
    from markupsafe import Markup, escape

    marks = "-/" if "-" in name else "._/:"  # a branch is named `stage-setting=value`
    return Markup(re.sub(rf"([{marks}])(?=\w)", r"\1<wbr>", str(escape(name))))
