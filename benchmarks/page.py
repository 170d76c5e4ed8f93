"""Pages whose parts are written by different benchmarks."""

import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "coverage.md"


def write_part(title: str, text: str, page: Path = PAGE, before: str = "") -> None:
    """Put a part in the place of the one with the same title, else before another, else last."""
    parts = re.split(r"^(?=# )", page.read_text(), flags=re.MULTILINE)
    new = f"# {title}\n\n{text.strip()}\n"
    heads = [part.partition("\n")[0] for part in parts]
    if f"# {title}" in heads:
        parts[heads.index(f"# {title}")] = new
    else:
        other = f"# {before}"
        parts.insert(heads.index(other) if other in heads else len(parts), new)
    page.write_text("\n".join(part.strip() + "\n" for part in parts if part.strip()))
    print(f"wrote `{title}` in {page.relative_to(ROOT)}")


def tables_of(title: str, page: Path) -> dict[str, str]:
    """Return the texts below the second headings of a page's part, with these, by heading."""
    parts = re.split(r"^# ", page.read_text(), flags=re.MULTILINE)
    part = next((part for part in parts if part.startswith(f"{title}\n")), "")
    _, *texts = re.split(r"^## ", part, flags=re.MULTILINE)
    return {text.partition("\n")[0]: f"## {text.strip()}" for text in texts}


def write_table(page: Path, command: str, lines: Sequence[str]) -> None:
    """Replace the table between the two marks of a page that name the command that writes it."""
    begin, end = f"<!-- written by {command} -->", "<!-- end -->"
    before, mark, rest = page.read_text().partition(begin)
    if not mark:
        raise SystemExit(f"{page}: has no {begin}")
    page.write_text("\n".join([before + begin, *lines, end + rest.partition(end)[2]]))
