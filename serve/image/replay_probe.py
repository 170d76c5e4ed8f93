"""Compare a container's answers with the recorded ones.

It runs as `python3 -m compress.serve.image.replay_probe`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np

from compress.artifacts.artifact import Artifact
from compress.common.errors import CompressError
from compress.profiling.batch_dependence import rounding_tolerance
from compress.serve.client.client import Client, OpenInference
from compress.serve.worker.wire import from_npz


def largest_difference(folder: Path, url: str, token: str | None) -> tuple[float, float]:
    """Return the largest difference from `probe.npz`, and rounding's, as shares of the spread."""
    artifact = Artifact.from_directory(folder / "model")
    probe = from_npz((folder / "probe.npz").read_bytes())
    inputs = [probe[spec.name] for spec in artifact.signature.inputs]
    rows = max((array.shape[0] for array in inputs if array.ndim), default=1)
    form = OpenInference()
    with Client(url, "model", artifact.signature, token=token, max_rows=rows, form=form) as client:
        answers = client.predict(inputs)
    largest = 0.0
    for spec, answer in zip(artifact.signature.outputs, answers, strict=True):
        expected = probe[spec.name].astype(np.float64)
        spread = float(np.ptp(expected)) or 1.0
        largest = max(largest, float(np.abs(answer - expected).max(initial=0.0)) / spread)
    return largest, rounding_tolerance(artifact)


def main() -> None:
    """Print the largest difference; exit with 1 if it exceeds rounding, or without an answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/opt/compress"))
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    given = parser.parse_args()
    try:
        token = os.environ.get("COMPRESS_SERVE_TOKEN")
        found, allowed = largest_difference(given.folder, given.url, token)
    except CompressError as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(
        f"largest difference from the recorded outputs: {found:g} of their spread "
        f"(rounding: {allowed:g})\n"
    )
    if not found <= allowed:
        sys.exit("error: the container does not answer as recorded")


if __name__ == "__main__":
    main()
