"""`compress bench`: reads its options, measures, and writes the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.atomic_files import write_atomically
from compress.pipelines.bench import bench, bench_page, parse_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from compress.pipelines.bench import Bench


def measure_and_write(
    artifacts: Sequence[Path],
    runtimes: str,
    batch: str,
    threads: str,
    seconds: float,
    html: Path | None,
    web: Path | None,
) -> Bench:
    """Measure artifacts, with numbers and runtimes as the command line has them."""
    found = bench(
        *artifacts,
        runtimes=[name.strip() for name in runtimes.split(",") if name.strip()],
        batch=parse_numbers("--batch", batch),
        threads=parse_numbers("--threads", threads),
        seconds=seconds,
        web=web,
    )
    if html is not None:
        write_atomically(html, bench_page(found))
    return found
