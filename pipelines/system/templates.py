"""Rendering of text files (YAML, shell scripts) with Jinja; templates quote through filters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def render_template(template: str, filters: Mapping[str, Callable[..., str]], **names: Any) -> str:
    """Render a template of `pipelines/templates` without HTML escaping."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1] / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= filters
    return environment.get_template(template).render(**names)
