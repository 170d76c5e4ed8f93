"""mkdocs hooks: complete the navigation, and check the pages that were built."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.exceptions import PluginError

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(
    r"""<(?:script|img|iframe)[^>]* src=["']?(?:https?:)?//"""
    r"""|<link[^>]* rel=["']?(?:stylesheet|icon|preconnect|preload)[^>]* href=["']?(?:https?:)?//"""
)
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)\)")


def on_config(config: Any) -> Any:
    """Put guides that mkdocs.yml does not name behind those that it does."""
    (guides,) = [part["Guides"] for part in config.nav if "Guides" in part]
    named = re.findall(r"[\w/-]+\.md", str(config.nav))
    for page in sorted(Path(config.docs_dir).glob("*.md")):
        if page.name not in named:
            title = page.read_text().partition("\n")[0].lstrip("# ").partition(":")[0]
            guides.append({title: page.name})
    return config


def on_post_build(config: Any) -> None:
    """Refuse a page that would fetch something from elsewhere when it is read.

    Raises:
        PluginError: there is one.
    """
    for page in Path(config.site_dir).rglob("*.html"):
        if found := FETCHED.search(page.read_text()):
            raise PluginError(f"{page}: fetches from elsewhere: {found[0]}")


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Show files of the repository by their paths, as the site does not have them; one title.

    Raises:
        PluginError: there is no such file.
    """
    if page.file.src_uri.startswith("reference/"):
        return markdown
    for _text, path in OUTSIDE.findall(markdown):
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: the repository has no {path}")
    markdown = OUTSIDE.sub(r"`\2`", markdown)
    if page.file.src_uri == "coverage.md":  # tables of several benchmarks, each with a title
        markdown = "# Coverage\n\n" + re.sub(r"^#", "##", markdown, flags=re.MULTILINE)
    return markdown
