"""What the engine around the stages costs: `python benchmarks/engine.py [PART ...]`.

`overhead` runs the quickstart twice, in a new process each, cold and warm: what of the cold run is
spent neither in a stage nor in judging one, what a run takes that finds all in the store, and what
importing torch and the example's scikit-learn takes of either.
`store` seals an artifact of 2 GB, takes it from the store, publishes it and removes it again: the
most memory above what the process had, and how often its bytes lie on the disk.

A run's processor time depends less on what else the machine does than its seconds; both are shown.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from compress.profiling.rss import memory_kib, reset_peak

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "pipelines" / "quickstart.yaml"
GIGABYTE = 10**9
PARTS = ("overhead", "store")
COMMAND = """
import sys, time
from compress import cli
from compress.pipelines.runner.executor import PipelineExecutor

def timed(self, test=PipelineExecutor.evaluate_test_split):
    began = time.monotonic()
    test(self)
    print("tested", time.monotonic() - began, file=sys.stderr)

PipelineExecutor.evaluate_test_split, sys.argv[0] = timed, "compress"
cli.main()
"""
"""The command, which also tells how long the test split took; the report does not."""


def overhead(folder: Path) -> None:
    print("| quickstart | seconds | of the processor | stages | judging, test | the rest |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in ("cold", "warm"):
        seconds, processor, stderr = _run(
            COMMAND, "run", QUICKSTART, "--out", folder / "quickstart"
        )
        tested = float(stderr.rpartition("tested ")[2].split()[0])
        report = json.loads((folder / "quickstart" / "report.json").read_text())
        made = sum(s["seconds"] for s in report["stages"] if not s["cached"])
        judged = tested + sum(s["judged_seconds"] for s in report["stages"])
        rest = seconds - made - judged
        share = f" ({100 * rest / seconds:.1f} %)" if name == "cold" else ""
        print(
            f"| {name} | {seconds:.1f} | {processor:.1f} | {made:.1f} | {judged:.1f} "
            f"| {rest:.1f}{share} |"
        )
    seconds, processor, _ = _run("import torch, sklearn.datasets")
    print(f"| the imports alone | {seconds:.1f} | {processor:.1f} | | | |")


def _run(code: str, *arguments: str | Path) -> tuple[float, float, str]:
    """Return the seconds of a new process, those of the processor, and its stderr."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, processor, done.stderr


def store(folder: Path) -> None:
    from compress.common.signature import Signature, TensorSpec
    from compress.export.onnx.stage import OnnxModel
    from compress.pipelines.store.entry import Record
    from compress.pipelines.store.local import Store, publish, unpublish

    entry = Store(folder / ".store").entry({"stage": "large"})
    published = folder / "artifacts" / "large"
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))

    def seal() -> None:
        with OnnxModel.atomic_write(entry.artifact_path, signature) as partial:
            _write(partial / OnnxModel.payload, 2 * GIGABYTE)
        digest = OnnxModel.from_directory(entry.artifact_path).digest
        entry.commit(Record(parts={}, digest=digest, seconds=0))

    def show() -> None:
        publish(OnnxModel.from_directory(entry.artifact_path), published)

    print("| 2 GB | seconds | peak above the start, MB | on the disk, GB |")
    print("|---|---:|---:|---:|")
    _told("write and seal", seal, folder)
    _told("take from the store", lambda: entry.load() or sys.exit("it is not there"), folder)
    _told("publish", show, folder)
    _told("publish again", show, folder)
    _told("remove what was published", lambda: unpublish(published.parent), folder)


def _write(file: Path, size: int) -> None:
    """Write bytes that no file system can leave out, a part at a time."""
    part = os.urandom(2**24)
    with file.open("wb") as stream:
        while (left := size - stream.tell()) > 0:
            stream.write(part[:left])


def _told(what: str, do: Callable[[], object], folder: Path) -> None:
    reset_peak()
    before, began = memory_kib("VmRSS"), time.monotonic()
    do()
    seconds, peak = time.monotonic() - began, (memory_kib("VmHWM") - before) * 1024 / 1e6
    print(f"| {what} | {seconds:.2f} | {peak:.0f} | {_on_disk(folder) / GIGABYTE:.2f} |")


def _on_disk(folder: Path) -> int:
    """Return the bytes that a folder takes; a file with several names is there once."""
    found = {f.stat().st_ino: f.stat().st_blocks * 512 for f in folder.rglob("*") if f.is_file()}
    return sum(found.values())


def main(names: list[str]) -> None:
    unknown = set(names) - set(PARTS)
    if unknown:
        sys.exit(f"unknown part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    sys.path.insert(0, str(ROOT))
    parts = {"overhead": overhead, "store": store}
    for name in names or PARTS:
        folder = Path(tempfile.mkdtemp(prefix="engine-"))
        try:
            parts[name](folder)
        finally:
            shutil.rmtree(folder)
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
