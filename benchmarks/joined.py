"""How many answers change beside hostile requests, asked of the real servers.

    python benchmarks/joined.py                  # 10,000 requests to the built-in server
    python benchmarks/joined.py --torchserve     # 2,000 to TorchServe, which joins up to 8

A small text classifier is quantized with ranges of the whole call and of each row. Sixteen clients
ask at once, and every other request is hostile: tokens with far larger activations. Each answer is
held against what the packaged file answers to the same text alone.
"""

import argparse
import http.client
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from compress.pipelines import Pipeline
from compress.serve.torchserve.process import TorchServe
from compress.serve.worker.wire import from_npz, to_npz
from tests.serve.text_nets import RARE, TOKENS, texts

ROOT = Path(__file__).parents[1]
TOKEN = "a-token-of-the-benchmark"
CLIENTS = 16
MOVED = 1e-4
FILE = """
version: 1
name: {name}
code: {code}
model:
  factory: "tests.serve.text_nets:Classifier"
  inputs:
    - {{name: ids, shape: [batch, length], dtype: int64}}
    - {{name: mask, shape: [batch, length], dtype: int64}}
  outputs: [{{name: logits}}]
data: {{factory: "tests.serve.text_nets:data"}}
metric: fidelity
stages:
  - {{stage: quantize_dynamic, activation_range: {name}}}
  - {{name: onnx, stage: export_onnx}}
"""
ARCHIVE = "  - {name: mar, stage: package_torchserve, batch_size: 8, max_batch_delay_ms: 5}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torchserve", action="store_true")
    parser.add_argument("--requests", type=int)
    given = parser.parse_args()
    count = given.requests or (2_000 if given.torchserve else 10_000)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tensor", "row"):
            out = run(Path(folder), name, archive=given.torchserve)
            server = torchserve(out) if given.torchserve else built_in(out)
            with server as (url, path, token):
                moved, labels, seconds = ask(url, path, token, out, count)
            print(
                f"activation_range {name}: {moved} of {count} answers changed, {labels} labels; "
                f"{count / seconds:.0f} requests/s",
                flush=True,
            )


def run(folder: Path, name: str, *, archive: bool) -> Path:
    """Quantize and package the classifier; return the run's folder."""
    file = folder / f"{name}.yaml"
    file.write_text(FILE.format(name=name, code=ROOT) + (ARCHIVE if archive else ""))
    report = Pipeline.from_yaml(file).run(folder / name)
    assert report.status == "passed", report.error
    for warning in report.warnings:
        print(f"! {warning}")
    return folder / name


@contextmanager
def built_in(out: Path):
    environment = os.environ | {"COMPRESS_SERVE_TOKEN": TOKEN}
    command = [sys.executable, "-m", "compress.cli", "serve", out / "artifacts" / "onnx"]
    with subprocess.Popen(
        [*command, "--port", "0", "--workers", "1"],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            where = process.stdout.readline()
            url = where.split("served at ")[1].split("/v2/")[0]
            yield url, "/v2/models/model/infer", TOKEN
        finally:
            process.terminate()


@contextmanager
def torchserve(out: Path):
    with TorchServe(out / "artifacts" / "mar" / "model.mar") as server:
        yield server.url, f"/predictions/{server.model_name}", server.token


def ask(url: str, path: str, token: str, out: Path, count: int) -> tuple[int, int, float]:
    """Return how many answers moved, how many labels changed, and the seconds it took."""
    real, hostile = (texts(count // 2, *tokens, 3) for tokens in ((0, RARE), (RARE, TOKENS)))
    rows = [row for pair in zip(real, hostile, strict=True) for row in pair]
    sent = [{name: value[None].numpy() for name, value in row.items()} for row in rows]
    answers: list[np.ndarray] = [np.empty(0)] * len(sent)
    headers = {"Content-Type": "application/x-npz", "Accept": "application/x-npz"}
    headers["Authorization"] = f"Bearer {token}"

    def client(first: int) -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        for i in range(first, len(sent), CLIENTS):
            connection.request("POST", path, to_npz(sent[i]), headers)
            response = connection.getresponse()
            body = response.read()
            assert response.status == 200, body
            answers[i] = from_npz(body)["logits"]
        connection.close()

    began = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(client, range(CLIENTS)))  # raises what one of them raised
    seconds = time.monotonic() - began
    alone = answers_alone(out, sent)
    pairs = [*zip(alone, answers, strict=True)]
    moved = sum(np.abs(a - b).max() > MOVED for a, b in pairs)
    labels = sum(int(a.argmax() != b.argmax()) for a, b in pairs)
    return int(moved), labels, seconds


def answers_alone(out: Path, sent: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    file = str(out / "artifacts" / "onnx" / "model.onnx")
    session = onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"])
    return [session.run(None, inputs)[0] for inputs in sent]


if __name__ == "__main__":
    main()
