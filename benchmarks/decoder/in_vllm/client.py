"""A process that has folders open in vLLM, asked from here."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from safetensors.torch import load_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

RUNNER = Path(__file__).with_name("runner.py")


class Vllm:
    """Asks a process of `runner.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, **question: Any) -> Any:
        """Return the answer to a line of JSON."""
        given: IO[str] | None = self.process.stdin
        answers: IO[str] | None = self.process.stdout
        assert given is not None
        assert answers is not None
        print(json.dumps(question), file=given, flush=True)
        line = answers.readline()
        if not line:
            raise SystemExit(f"vLLM ended at {question}: {self.process.wait(60)}")
        return json.loads(line)

    def scores(self, tokens: list[int], to: Path) -> torch.Tensor:
        """Return the logits after each token, `(tokens, vocabulary)`."""
        self.ask(scores=tokens, to=str(to))
        return load_file(to)["scores"]


@contextmanager
def vllm(python: Path, dtype: str, *options: str, log: Path) -> Iterator[Vllm]:
    """Yield a process of an environment with vLLM, which is ended afterwards."""
    path = f"{python.parent}:{os.environ['PATH']}"  # ninja lies there
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [python, "-W", "ignore", RUNNER, dtype, *options],
            env=clean | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield Vllm(process)
        finally:
            process.kill()
