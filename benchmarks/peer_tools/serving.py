"""Requests a second of servers, of an int8 network of digits and an int8 sentence encoder."""

from __future__ import annotations

import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.server.contenders import Case, InProcess, Server, built_in, packaged
from benchmarks.server.peer_servers import (
    PEER_SERVERS,
    answer_of,
    named_request,
    protocol_request,
)
from compress.artifacts.artifact import Artifact
from compress.common.errors import Unavailable
from compress.serve.worker.loaders import LOADERS
from peer_tools.encoder import pipeline_head
from peer_tools.environments import cpu_seconds, environment

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from benchmarks.server.peer_servers import Row

    Figures = dict[tuple[str, int], list[dict[str, float]]]
    """What each round saw, by server and connections."""

ROOT = Path(__file__).parents[2]
CONNECTIONS = (1, 8, 32)
ROUNDS, SECONDS, WARM_SECONDS = 3, 1, 8
ATOL = 1e-3
HELD_OUT = 32
TOKENS = 32
DIGITS = """version: 1
name: digits
threads: 1
code: {code}
model:
  factory: "models:resnet20"
  inputs: [{{name: image, shape: [batch, 1, 8, 8]}}]
  outputs: [{{name: logits}}]
data: {{factory: "data:digits", batch_size: 120}}
metric: accuracy
stages:
  - {{stage: train, epochs: 3}}
  - {{stage: prune_channels, ratio: 0.5, finetune: {{epochs: 1, batch_size: 32}}}}
  - {{name: int8, stage: quantize_static, calibration_samples: 512}}
"""
SMOOTHED = "stages:\n  - {name: int8, stage: quantize_dynamic, smooth: auto}\n"
EXPORT = "  - {name: onnx, stage: export_onnx, gates: [{gate: parity, atol: 0.5}]}\n"
INTRODUCTION = f"""`wrk` sends the same row over and over, in JSON unless named, from the same
cores. Each server runs the same ONNX file, a call on one thread, as its documentation
shows it. Requests a second are medians of {ROUNDS} rounds of {SECONDS} s, all servers in
turn. The share is that of in-process calls by as many threads as connections, with the rounds'
range.
"""


@dataclass(frozen=True)
class Model:
    """A model to serve, and the row that is sent."""

    title: str
    pipeline: str
    row: Row
    workers: int
    """Processes of TorchServe: one that joins requests does better for a model of microseconds."""


def tables(folder: Path, given: argparse.Namespace) -> Iterator[str]:
    """Yield a table for each model."""
    for number, model in enumerate(_models(folder)):
        yield _table(model, folder / f"serving-{number}", given)


def _models(folder: Path) -> Iterator[Model]:
    random = np.random.default_rng(0)
    image = (random.integers(0, 17, (1, 1, 8, 8)) / 16).astype(np.float32)
    digits = DIGITS.format(code=ROOT / "examples" / "digits")
    yield Model("Serving, int8 digits", digits, {"image": image}, 1)
    found = pipeline_head(folder, {"train": HELD_OUT, "held_out": HELD_OUT})
    if found is not None:
        ids = random.integers(1000, 20_000, (1, TOKENS))
        row = {"ids": ids, "mask": np.ones_like(ids)}
        yield Model("Serving, int8 MiniLM of 32 tokens", found[0] + SMOOTHED, row, 2)


def _table(model: Model, root: Path, given: argparse.Namespace) -> str:
    artifact = _artifact(model, root)
    (in_process,) = _outputs(artifact, model.row)
    seen: Figures = {}
    with ExitStack() as stack:
        servers, failures = _start(model, artifact, root, given, stack)
        for server in servers:
            _check(server, in_process)
        _warm_up(servers)
        rounds, seconds = (1, 1) if given.small else (ROUNDS, SECONDS)
        for _ in range(rounds):
            for connections in CONNECTIONS:
                for each in (InProcess(artifact), *servers):
                    found = each.run(Case(connections, 1), seconds)
                    seen.setdefault((each.name, connections), []).append(found)
    names = dict.fromkeys(name for name, _ in seen)
    head = "".join(f" {n} |" for n in CONNECTIONS)
    lines = [
        f"## {model.title}\n\n{INTRODUCTION}",
        f"| requests/s, connections |{head} p50, p99 ms at 32 | share of in process at 8 | at 32 |",
        f"|---{'|---' * len(CONNECTIONS)}|---|---|---|",
        *(_row(name, seen) for name in names),
        *(f"| {name} | failed: {failure} |" for name, failure in failures.items()),
    ]
    return "\n".join(lines)


def _artifact(model: Model, root: Path) -> Artifact:
    """Run the pipeline; return its ONNX artifact, whose report says that rows may be joined."""
    root.mkdir(parents=True)
    file = root / "pipeline.yaml"
    file.write_text(model.pipeline + EXPORT)
    command = [sys.executable, "-m", "compress.cli", "run", file, "--out", root / "run"]
    seconds = cpu_seconds(command, ROOT)
    if isinstance(seconds, str):
        raise SystemExit(f"{model.title}: {seconds}")
    return Artifact.from_directory(root / "run" / "artifacts" / "onnx")


def _outputs(artifact: Artifact, row: Row) -> list[np.ndarray]:
    signature = artifact.signature
    settings = {"inputs": [{"name": name} for name in row]}
    settings["outputs"] = [output.name for output in signature.outputs]
    return LOADERS["onnx"](artifact.payload_path, settings, 1)([*row.values()])


def _start(
    model: Model, artifact: Artifact, root: Path, given: argparse.Namespace, stack: ExitStack
) -> tuple[list[Server], dict[str, str]]:
    """Start all servers; return them, and why others did not start."""
    own = stack.enter_context(built_in(artifact, processes=1))
    two = stack.enter_context(built_in(artifact, processes=2))
    servers, failures = [], {}
    for server, name, binary in (
        (own, "**compress serve**", False),
        (own, "**compress serve**, binary tensors", True),
        (two, "**compress serve** `--processes 2`", False),
    ):
        servers.append(_asked(server, name, model.row, binary=binary))
    try:
        archive = stack.enter_context(packaged(artifact, root / "archive", model.workers))
        request = named_request(archive.url, {}, {"Authorization": f"Bearer {archive.token}"})
        body = json.dumps({"inputs": {name: a.tolist() for name, a in model.row.items()}})
        request = replace(request, body=body.encode())
        name = "**package_torchserve**, in TorchServe"
        servers.append(replace(archive, name=name, request=lambda _: request))
    except Unavailable as error:
        failures["**package_torchserve**"] = str(error)
    for name in [name for name in PEER_SERVERS if name in given.peers]:
        folder = root / name
        folder.mkdir()
        python = environment(name, given.environments)
        start = PEER_SERVERS[name]
        try:
            context = start(python, artifact.payload_path, model.row, folder)
            servers.append(stack.enter_context(context))
        except SystemExit as error:
            failures[name] = str(error)[:120]
    return servers, failures


def _asked(server: Server, name: str, row: Row, *, binary: bool) -> Server:
    """Return the built-in server as it is asked in one of its forms."""
    headers = {"Authorization": f"Bearer {server.token}"}
    request = protocol_request(server.url, row, headers, binary=binary)
    return replace(server, name=name, request=lambda _: request)


def _check(server: Server, expected: np.ndarray) -> None:
    """Compare a server's answer with the one in process."""
    body = answer_of(server.request(1)) or b""
    if b"binary_data_size" in body:
        found = np.frombuffer(body[-expected.nbytes :], expected.dtype)
    else:
        found = np.array(_numbers(json.loads(body or "[]")), np.float64)
    if found.size != expected.size or not np.allclose(found, expected.ravel(), 0, ATOL):
        raise SystemExit(f"{server.name} answers {body[:80]!r}, expected {expected.ravel()[:4]}")


def _numbers(value: Any) -> list[float]:
    """Return the floats of a response, in their order."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        return [number for part in value for number in _numbers(part)]
    return [value] if isinstance(value, float) else []


def _warm_up(servers: list[Server]) -> None:
    """Load all servers at once, until Java has compiled what runs often."""
    with ThreadPoolExecutor(len(servers)) as threads:
        list(threads.map(lambda server: server.run(Case(8, 1), WARM_SECONDS), servers))


def _row(name: str, seen: Figures) -> str:
    def median(figure: str, connections: int) -> float:
        return statistics.median(found[figure] for found in seen[name, connections])

    rates = [f"{median('per_second', n):,.0f}" for n in CONNECTIONS]
    times = f"{median('p50_ms', 32):.1f}, {median('p99_ms', 32):.1f}"
    shares = []
    for connections in CONNECTIONS[1:]:
        pairs = zip(seen[name, connections], seen[InProcess.name, connections], strict=True)
        each = [found["per_second"] / base["per_second"] for found, base in pairs]
        shares.append(f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})")
    return f"| {' | '.join([name, *rates, times, *shares])} |"
