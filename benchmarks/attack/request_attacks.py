"""Send hostile requests to running servers, and measure their health and memory meanwhile.

    python benchmarks/attack/request_attacks.py [--only WORDS] [--kind decoder] [--models FOLDER]

A server of each kind (tensors, texts, a decoder of 32,768 tokens) answers all of its attacks, one
after the other. `health` is the slowest of the questions for its health, each on a new connection;
`MiB` how much the memory of all its processes grew; `500s` how many answers were an internal error.
The decoder generates by onnxruntime-genai where that is installed, else by onnxruntime.
"""

import argparse
import collections
import contextlib
import json
import re
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.attack.requests import ANY, HEALTH, HostileRequest, hostile_requests

CONTEXT = 32_768
MOST_SECONDS, MOST_MIB = 1.0, 50.0
GOES_ON_SECONDS = 60.0
"""After so long an attacker gives up."""


class Outcome(NamedTuple):
    """What a server did during one attack."""

    statuses: collections.Counter[str]
    health: float
    """Seconds of the slowest question for its health; infinite where one was not answered."""
    grown_mib: float
    seconds: float

    @property
    def survived(self) -> bool:
        """Whether health was answered in time, memory stayed, and nothing was an internal error."""
        within = self.health <= MOST_SECONDS and self.grown_mib <= MOST_MIB
        return within and "500" not in self.statuses


def send(request: HostileRequest, kind: str, port: int) -> collections.Counter[str]:
    """Send a request on all of its connections; return how often each status was answered."""
    statuses: collections.Counter[str] = collections.Counter()

    def attack() -> None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=GOES_ON_SECONDS) as each:
                answered(each, statuses)
        except OSError as error:
            statuses[type(error).__name__] += 1

    def answered(each: socket.socket, found: collections.Counter[str]) -> None:
        reading = threading.Thread(target=read, args=(each, found))
        if request.ending in ("reads", "shuts"):
            reading.start()
        with contextlib.suppress(OSError):
            for part in request.parts(kind):
                each.sendall(part)
                time.sleep(request.pause)
            if request.ending == "shuts":
                each.shutdown(socket.SHUT_WR)
        if request.ending == "ignores":
            time.sleep(3)
        if reading.is_alive():
            reading.join(GOES_ON_SECONDS)

    def read(each: socket.socket, found: collections.Counter[str]) -> None:
        rest, last, is_answered = b"", time.monotonic(), False
        while time.monotonic() - last < GOES_ON_SECONDS:
            if not select.select([each], [], [], 1)[0]:
                if is_answered:  # a kept connection: all that was asked is answered
                    return
                continue
            try:
                part = each.recv(65536)
            except OSError:
                return
            if not part:
                return
            codes = re.findall(rb"HTTP/1\.[01] (\d{3}) ", rest + part)
            found.update(code.decode() for code in codes)
            is_answered |= bool(codes)
            rest = part[-12:]

    threads = [threading.Thread(target=attack) for _ in range(request.connections)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return statuses


def processes_of(pid: int) -> list[psutil.Process]:
    """Return a process and all below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def mebibytes(pid: int) -> float:
    """Return the memory that a server's processes have for themselves, and their share of what is
    common to them."""
    total = 0
    for process in processes_of(pid):
        with contextlib.suppress(psutil.Error, OSError):
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def health(port: int) -> float:
    """Return how long a question for the health took."""
    began = time.monotonic()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as each:
            each.sendall(HEALTH)
            answer = each.recv(100)
        return time.monotonic() - began if b" 200 " in answer else float("inf")
    except OSError:
        return float("inf")


def attacked(place: int, kind: str, port: int, pid: int) -> Outcome:
    """Return what a server did during an attack, by another process, and shortly after."""
    before = most = mebibytes(pid)
    began, slowest, after = time.monotonic(), 0.0, 0
    command = [sys.executable, __file__, "--send", str(place), kind, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
        while after < 3:
            slowest = max(slowest, health(port))
            most = max(most, mebibytes(pid))
            time.sleep(0.05)
            after += attacker.poll() is not None
        assert attacker.stdout is not None
        statuses = collections.Counter(json.loads(attacker.stdout.read()))
    return Outcome(statuses, slowest, most - before, time.monotonic() - began)


@contextlib.contextmanager
def server_of(kind: str, models: Path) -> Iterator[Any]:
    """Start a server of a kind; its model is made where it is not there."""
    from compress.artifacts.artifact import Artifact
    from tests.serve.openai import session_decoder
    from tests.serve.served_here import sealed, serving

    place = models / kind
    if not place.is_dir():
        {"tensor": sealed, "text": text_model, "decoder": decoder_model}[kind](place)
    if kind != "decoder" or has_genai():
        with serving(place) as server:
            yield server
        return
    with session_decoder.serving_by_session(Artifact.from_directory(place)) as server:
        yield server


def has_genai() -> bool:
    """Return whether onnxruntime-genai is installed."""
    from compress.export.genai.runtime import GENAI

    return not GENAI.missing()


def text_model(place: Path) -> None:
    """Make a tiny text classifier with a tokenizer."""
    import torch
    import transformers

    from compress import Context
    from compress.export import ExportOnnx
    from tests.serve import test_carried_files as bert

    root = place.with_name("text-parts")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        intermediate_size=24,
        vocab_size=len(bert.WORDS),
        max_position_embeddings=bert.LONGEST,
        **sizes,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(root / "hf")
    bert.tokenizer(model_max_length=bert.LONGEST).save_pretrained(root / "hf")
    names = ("input_ids", "attention_mask", "token_type_ids")
    source = bert.imported(root / "hf", root / "source", names)
    ExportOnnx().run(source, Context(root=place))


def decoder_model(place: Path) -> None:
    """Make a tiny decoder of a long context with a chat template."""
    from compress.common.signature import AxisBounds
    from compress.export import ExportGenai
    from tests.export import tiny_decoder as tiny
    from tests.serve.openai.conftest import CHAT_TEMPLATE

    tiny.TOKENS = tiny.TOKENS.model_copy(update={"axes": {"length": AxisBounds(max=CONTEXT)}})
    root = place.with_name("decoder-parts")
    source = tiny.decoder(root, chat_template=CHAT_TEMPLATE, max_position_embeddings=CONTEXT)
    ExportGenai(context=CONTEXT)(source, tiny.context_for(source, place))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="requests whose name holds this")
    parser.add_argument("--kind", choices=ANY)
    parser.add_argument("--models", type=Path, help="folder in which models are kept")
    parser.add_argument("--send", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    requests = [*hostile_requests()]
    if given.send:
        place, kind, port = given.send
        print(json.dumps(send(requests[int(place)], kind, int(port))))
        return
    tried: collections.Counter[str] = collections.Counter()
    survived: collections.Counter[str] = collections.Counter()
    print(f"{'':60}{'health, s':>10}{'MiB':>8}{'s':>7}  answers")
    with tempfile.TemporaryDirectory() as folder:
        models = given.models or Path(folder)
        for kind in [given.kind] if given.kind else ANY:
            with server_of(kind, models) as server:
                port, pid = int(server.url.rpartition(":")[2]), server.process.pid
                health(port)
                before = mebibytes(pid)
                for place, request in enumerate(requests):
                    if kind not in request.servers or given.only not in request.name:
                        continue
                    seen = attacked(place, kind, port, pid)
                    tried[kind] += 1
                    survived[kind] += seen.survived
                    codes = ", ".join(f"{n}× {code}" for code, n in seen.statuses.items())
                    print(
                        f"{'  ' if seen.survived else '! '}{kind:8}{request.name[:49]:50}"
                        f"{seen.health:>10.2f}{seen.grown_mib:>8.0f}{seen.seconds:>7.1f}  {codes}",
                        flush=True,
                    )
                kept = mebibytes(pid) - before
                print(f"  {kind}: {survived[kind]} of {tried[kind]} survived; {kept:.0f} MiB kept")
    print(f"tried {tried.total()}, survived {survived.total()}")
    sys.exit(tried != survived)


if __name__ == "__main__":
    main()
