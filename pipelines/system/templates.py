"""Jinja environments; rendering of text files (YAML, shell scripts)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.pipelines.system.yaml_core import dump_on_one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from jinja2 import Environment


def jinja_environment(autoescape: bool, **filters: Callable[..., str]) -> Environment:
    """Create the environment of `pipelines/templates`, where an unknown name is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1] / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not autoescape,
        autoescape=autoescape,
    )
    environment.filters |= filters
    return environment


def render_template(template: str, **names: Any) -> str:
    """Render a text file; the filter `yaml` quotes a value on one line."""
    return _text_environment().get_template(template).render(**names)


@cache
def _text_environment() -> Environment:
    return jinja_environment(autoescape=False, yaml=dump_on_one_line)
