"""Runs a pipeline again and again, each time killed elsewhere; run as a script, it prints JSON.

The libraries are imported once, and every run is a fork. A run is killed at a random time, or
right before a random one of its operations on files, which is where a half-written state would be.
"""

import contextlib
import functools
import gc
import hashlib
import importlib
import io
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import psutil

TIMINGS = {
    "date",
    "seconds",
    "judged_seconds",
    "latency_ms",
    "peak_mebibytes",
    "same_runtime",
    "speedup",
    "speedup_interval",
    "speedup_blocks",
}
"""Of a report, what no two runs have alike."""
HOW_IT_CAME = {"cached", "reason", "seal"}
"""Of a report, what a resumed run has otherwise: stages that were done before are cached."""
OPERATIONS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link"}
MOST_IMPORTED = [
    *("compress.pipelines.api", "compress.pipelines.runner.run", "compress.training.stage"),
    *("compress.training.fit", "compress.training.loop.trainer", "compress.export.onnx.stage"),
    *("onnxscript.function_libs.torch_lib.ops", "torch.onnx", "torch.export._trace"),
]
"""Modules with most of what a run imports, which its first fork would import for itself alone."""
NEVER = 10**9


class Killed:
    """What the killed runs of a project came to."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.file, self.out, self.log = folder / "small.yaml", folder / "out", folder / "log"
        self.temporary = folder / "tmp"
        self.whole = folder / "whole"
        self.random = random.Random(seed)
        self.at: list[str] = []
        self.struck: list[str] = []
        self.resumed = self.completed = 0

    def reference(self) -> None:
        """Run once without a kill, and keep what came of it elsewhere."""
        for _ in range(2):
            shutil.rmtree(self.out, ignore_errors=True)
            assert self.run(NEVER, NEVER) == 0, self.log.read_text()
            record = json.loads(self.log.with_suffix(".json").read_text())
            self.seconds, self.operations = record["seconds"], record["operations"]
            _import(record["modules"])
            _keep_what_is_imported()
        self.expected = self.found()
        self.out.rename(self.whole)

    def kill(self, times: int) -> None:
        """Kill runs, resuming each, and compare whenever one came to its end.

        More than `times` of them where none was killed so that a training had to resume.
        """
        most = max(4 * times, 24)
        while len(self.at) < times or not (self.resumed or len(self.at) >= most):
            if self.random.random() < 0.5:
                ended = self.run(self.random.uniform(0, self.seconds / 2), NEVER)
            else:
                ended = self.run(NEVER, self.random.randrange(self.operations // 2))
            lines = self.log.read_text().splitlines()
            self.resumed += any("resumed after" in line for line in lines)
            if ended == 0:
                self.compare()
            else:
                lost = ended == 1 and any("was ended by SIGKILL" in line for line in lines)
                assert lost or ended == -signal.SIGKILL, "\n".join([self.place(), *lines])
                self.at.append(lines[-1] if lines else "before anything was said")
                self.refuse_halves()
        if self.out.exists():
            assert self.run(NEVER, NEVER) == 0, self.log.read_text()
            self.compare()

    def place(self) -> str:
        """Return where the last run was killed."""
        return f"after kill {len(self.at)}: {self.at[-1:]}"

    def compare(self) -> None:
        """Hold a finished run against the one that nobody killed, and begin anew."""
        found = self.found()
        wrong = {
            name: (found.get(name), self.expected.get(name))
            for name in sorted({*found, *self.expected})
            if found.get(name) != self.expected.get(name)
        }
        assert not wrong, (self.place(), wrong)
        assert not _left_running(self.temporary), self.place()
        self.completed += 1
        shutil.rmtree(self.out)

    def found(self) -> dict[str, object]:
        """Return the report, every artifact's bytes, and the names of all other files."""
        from compress.common.sealed_json import load_sealed

        found: dict[str, object] = {
            "report": _timeless(load_sealed((self.out / "report.json").read_bytes()))
        }
        found["lock"] = _read(self.out / "lock.json")
        for path in sorted(self.out.rglob("*")):
            name = path.relative_to(self.out).as_posix()
            sealed = path.is_file() and "artifact" in name
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if sealed else "is there"
        return found | {f"temporary {path}": "left" for path in self.temporary.rglob("*")}

    def refuse_halves(self) -> None:
        """Look at what a killed run left: nothing that has a name of its own may be a half."""
        from compress.artifacts.artifact import MANIFEST, Artifact

        for name in ("report.json", "lock.json"):
            if (self.out / name).exists():
                _read(self.out / name)
        folders = self.out / "artifacts", *(self.out / ".store").glob("*")
        for folder in folders:
            for path in folder.glob("[!.]*"):
                if folder.name == "artifacts" or path.name == "artifact":
                    assert (path / MANIFEST).exists(), (self.place(), path)
                    Artifact.from_directory(path).verify()

    def run(self, seconds: float, operation: int) -> int:
        """Run in a fork, killed after some seconds or before an operation; return how it ended."""
        sys.stdout.flush()
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            self._child(operation)
        ended, status = 0, 0
        while not ended:
            if seconds < NEVER and _seconds_of(child) > seconds:
                self.strike(child)
                seconds = NEVER
            time.sleep(0.02)
            ended, status = os.waitpid(child, os.WNOHANG)
        return os.waitstatus_to_exitcode(status)

    def strike(self, process: int) -> None:
        """Kill a run with all its processes, itself alone, or one of its training processes."""
        family = psutil.Process(process).children(recursive=True)
        ranks = [p for p in family if "spawn_main" in _command_of(p)]
        victim = self.random.choice(["group", "runner", "rank"]) if ranks else "group"
        if ranks:
            self.struck.append(victim)
        if victim == "group":
            os.killpg(process, signal.SIGKILL)
        elif victim == "runner":
            os.kill(process, signal.SIGKILL)
        else:
            self.random.choice(ranks).kill()

    def _child(self, operation: int) -> None:
        with self.log.open("w", buffering=1) as log:
            try:
                self._walk(operation, log)
                code = 0
            except BaseException:  # noqa: BLE001 - record to the parent
                traceback.print_exc(file=log)
                code = 1
        os._exit(code)

    def _walk(self, operation: int, log: io.TextIOBase) -> None:
        from compress.pipelines import Pipeline

        tempfile.tempdir = os.environ["TMPDIR"] = str(self.temporary)
        count = 0

        def before(event: str, arguments: tuple) -> None:
            nonlocal count
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
            if not (writes or event in OPERATIONS):
                return
            path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes) else "."
            if path.startswith("/") and not path.startswith(str(self.out.parent)):
                return
            count += 1
            if count > operation:
                log.write(f"{event} {path.removeprefix(str(self.out))}\n")
                os.kill(os.getpid(), signal.SIGKILL)

        def progress(task: str, done: int, total: int, note: str = "") -> None:
            log.write(f"{task} {done}/{total} {note}\n")

        sys.addaudithook(before)
        with contextlib.redirect_stderr(log):
            Pipeline.from_yaml(self.file).run(
                self.out, announce=lambda line: log.write(line + "\n"), progress=progress
            )
        record = {"operations": count, "seconds": sum(os.times()[:4]), "modules": [*sys.modules]}
        self.log.with_suffix(".json").write_text(json.dumps(record))


def _command_of(process: psutil.Process) -> str:
    """Return a process's command; nothing of one that has just ended."""
    with contextlib.suppress(psutil.Error):
        return str(process.cmdline())
    return ""


def _left_running(temporary: Path) -> list[list[str]]:
    """Return the commands of processes that killed runs have started and that are still there."""
    deadline, found = time.monotonic() + 60, ["?"]
    while found and time.monotonic() < deadline:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(temporary) in process.environ().get("TMPDIR", ""):
                    found.append(process.cmdline())
        time.sleep(0.2 * bool(found))
    return found


def _seconds_of(process: int) -> float:
    """Return the processor time of processes, which does not depend on what runs beside them."""
    seconds, family = 0.0, [str(process)]
    for member in family:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            place = Path("/proc", member)
            family += (place / "task" / member / "children").read_text().split()
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _read(path: Path) -> object:
    return json.loads(path.read_text())


def _timeless(value: object) -> object:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in TIMINGS | HOW_IT_CAME}
        return {k: _timeless(v) for k, v in kept.items()}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def _import(modules: list[str]) -> None:
    """Import what a run has imported, so that no further fork has to."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _keep_what_is_imported() -> None:
    """Keep the garbage collector of the forks from it, and read the exporter's table once."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    once = functools.cache(ONNXRegistry.from_torchlib)
    ONNXRegistry.from_torchlib = staticmethod(once)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _leave_the_server_out() -> None:
    """Answer with the packed model itself, and measure briefly: figures are not compared."""
    from compress.pipelines.results import measurements, schema
    from compress.profiling import benchmark, peak_memory, quantiles
    from compress.profiling.benchmark import CallTimer
    from compress.serve.torchserve.artifact import TorchServeArchive

    def inner(self: TorchServeArchive, device: str = "cpu", threads: int = 1):
        from compress.export.onnx.stage import OnnxModel

        packed = self.manifest.lineage[-1].inputs["input"]
        files = self.path.parent.parent.glob("*/artifact/model.onnx")
        found = (OnnxModel.from_directory(file.parent) for file in files)
        return next(model for model in found if model.digest == packed).open(device, threads)

    TorchServeArchive.open = inner
    benchmark.compare_latencies.__defaults__ = (0.01,)
    # Or what is said of figures would differ from run to run.
    quantiles.WIDEST = math.inf
    CallTimer.doubt = ""  # a machine that is busy
    schema.slower_than_float = lambda *_: iter(())
    measurements.runtime_of = lambda *_: None  # which exports the float model, too
    peak_memory.peak_memory = lambda *_: 0.0  # each fork would import torch once more


def main(folder: Path, seed: int, times: int) -> None:
    import torch

    torch.set_num_threads(1)  # a forked process has none of its parent's threads, and would wait
    if not os.environ.get("SERVED"):
        _leave_the_server_out()
    killed = Killed(folder, seed)
    killed.temporary.mkdir()
    _import(MOST_IMPORTED)
    killed.reference()
    killed.kill(times)
    record = {"at": killed.at, "resumed": killed.resumed, "completed": killed.completed}
    record |= {"seconds": killed.seconds, "operations": killed.operations, "struck": killed.struck}
    print(json.dumps(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
