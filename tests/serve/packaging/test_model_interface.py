"""What a model tells of itself when it is asked: shapes, and whether its rows may be joined."""

import asyncio
import json
import re
import threading
import time
from collections.abc import MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.export.exported_program import ExportProgram
from compress.export.torchscript.stage import ExportTorchScript
from compress.profiling.batch_dependence import BatchDependence
from compress.serve.http.dynamic_batcher import Batcher
from compress.serve.http.inference import Inference
from compress.serve.http.loaded_model import ServedModel, open_model, warm_up
from compress.serve.http.options import Limits
from compress.serve.http.shared_state import SharedState
from compress.serve.packaging.model_interface import (
    Interface,
    RecordedMeasurements,
    Tensor,
    infer_interface,
)
from compress.serve.worker.tensors import run_batched
from tests.serve.served_here import application_of

SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", shape=("batch", "steps", 3)),), outputs=(OutputSpec(name="y"),)
)


def inference(model: ServedModel, batcher: Batcher, limits: Limits | None = None) -> Inference:
    limits = limits or Limits()
    return Inference(model, batcher, limits, SharedState(limits, "t"))


def test_an_axis_that_follows_another_varies() -> None:
    found = infer_interface(lambda x: [x.sum(-1)], SIGNATURE)
    assert found.outputs[0].shape == (-1, -1)
    assert found.rows_stay_first
    found = infer_interface(lambda x: [x.sum(1).astype(np.float16)], SIGNATURE)
    assert (found.outputs[0].shape, found.outputs[0].dtype) == ((-1, 3), "float16")


def test_a_model_that_takes_one_size_has_only_varying_axes() -> None:
    def one_size(x: np.ndarray) -> list[np.ndarray]:
        if len(x) != 2:
            raise ValueError("batch")
        return [x]

    found = infer_interface(one_size, SIGNATURE)
    assert found.outputs[0].shape == (-1, -1, -1)
    assert not found.rows_stay_first


def test_answers_that_the_signature_does_not_name_are_refused() -> None:
    with pytest.raises(StageFailed, match="gives 2 outputs, its signature names"):
        infer_interface(lambda x: [x, x], SIGNATURE)


def test_outputs_with_another_number_of_rows_are_not_split() -> None:
    requests = [[np.array([1, 2])], [np.array([3])]]
    answers = run_batched(lambda arrays: [arrays[0][:2]], requests)
    assert [[output.tolist() for output in answer] for answer in answers] == [[[1, 2]], [[3]]]


def test_joined_requests_get_their_own_rows() -> None:
    calls = []

    def call(x: np.ndarray) -> list[np.ndarray]:
        calls.append(len(x))
        if (x == 9).any():
            raise IndexError("no 9")
        return [x * 2]

    def answers(*requests: list[float]) -> list[Any]:
        return run_batched(lambda arrays: call(*arrays), [[np.array(r)] for r in requests])

    assert [a[0].tolist() for a in answers([1], [2, 3], [4])] == [[2], [4, 6], [8]]
    assert calls == [4]
    good, bad = answers([1, 2], [9])
    assert good[0].tolist() == [2, 4]
    assert isinstance(bad, IndexError)


def test_requests_that_arrive_together_are_shared_among_the_idle_threads() -> None:
    two, calls = threading.Event(), []

    def call(x: np.ndarray) -> list[np.ndarray]:
        calls.append(len(x))
        if len(calls) > 1:
            two.set()
        assert two.wait(60), "one thread took all"
        return [x * 2]

    async def ask() -> list[Any]:
        batcher = Batcher(call, workers=2)
        rows = [[np.full((1, 3), i, np.float32)] for i in range(8)]
        answers = await asyncio.gather(*map(batcher.outputs, rows))
        batcher.close()
        return [answer[0].tolist() for answer in answers]  # type: ignore[index]

    assert asyncio.run(ask()) == [[[2.0 * i] * 3] for i in range(8)]
    assert (max(calls), sum(calls)) == (4, 8)


INFER = {
    "path": "/v2/models/m/infer",
    "method": "POST",
    "headers": [(b"authorization", b"Bearer t"), (b"content-type", b"application/json")],
}


async def receive() -> dict[str, object]:
    return {"type": "http.request", "body": b"[[[1, 9, 1]]]"}


@pytest.mark.parametrize(("breaks", "status"), [(False, 422), (True, 500)])
def test_a_failure_is_422_if_the_model_answers_its_example(breaks: bool, status: int) -> None:
    broken = []

    def call(x: np.ndarray) -> list[np.ndarray]:
        if broken or (x == 9).any():
            broken.extend([breaks] * breaks)
            raise RuntimeError("index out of range\nin /a/place")  # as TorchScript says it
        return [x * 2]

    async def ask() -> tuple[int, str]:
        model = ServedModel(
            "m", "torchscript", SIGNATURE, infer_interface(call, SIGNATURE), call, ""
        )
        batcher = Batcher(call)
        sent = []

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        await application_of(inference(model, batcher))(INFER, receive, send)
        batcher.close()
        return sent[0]["status"], json.loads(sent[1]["body"])["error"]

    words = "does not work any more" if breaks else "cannot answer these values"
    found, message = asyncio.run(ask())
    assert found == status
    assert message == f"the model {words}: RuntimeError: index out of range"


def test_a_client_that_leaves_while_it_is_answered_is_counted_once() -> None:
    def call(x: np.ndarray) -> list[np.ndarray]:
        return [x]

    async def send(message: MutableMapping[str, Any]) -> None:
        raise asyncio.CancelledError

    async def metrics() -> str:
        model = ServedModel("m", "onnx", SIGNATURE, infer_interface(call, SIGNATURE), call, "")
        application = application_of(inference(model, Batcher(call)))
        with pytest.raises(asyncio.CancelledError):
            await application(INFER, receive, send)
        application.close()
        return application.shared.metrics.text().decode()

    counts = re.findall(
        r'^inference_requests_total\{.*status="(\d+)".*\} (.+)', asyncio.run(metrics()), re.M
    )
    assert counts == [("200", "1.0")]


def test_a_server_whose_calls_all_hang_is_not_ready_until_one_ends() -> None:
    """A load balancer asks; the server itself stays alive."""
    entered, released = threading.Semaphore(0), threading.Event()

    def call(x: np.ndarray) -> list[np.ndarray]:
        entered.release()
        released.wait()
        return [x]

    async def states() -> list[int]:
        tensor = Tensor("x", "float32", (-1, 3))
        interface = Interface((tensor,), (tensor,), rows_stay_first=True)
        model = ServedModel("m", "onnx", SIGNATURE, interface, call, "")
        batcher = Batcher(call, workers=2, joins_rows=False)
        application = application_of(inference(model, batcher, Limits(seconds=0.01)))

        async def ready(path: str = "/v2/health/ready") -> int:
            sent: list[MutableMapping[str, Any]] = []

            async def send(message: MutableMapping[str, Any]) -> None:
                sent.append(message)

            scope = {"path": path, "method": "GET", "headers": [(b"authorization", b"Bearer t")]}
            await application(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]  # unread
            assert json.loads(sent[1]["body"]).get("ready", True) == (sent[0]["status"] == 200)
            return int(sent[0]["status"])

        async def until(status: int) -> int:
            async with asyncio.timeout(60):
                while await ready() != status:
                    await asyncio.sleep(0.01)
            return await ready("/v2/models/m/ready")

        found = [await ready()]
        first = asyncio.create_task(batcher.outputs([np.ones((1, 3), np.float32)]))
        await asyncio.to_thread(entered.acquire)
        await asyncio.sleep(0.05)  # one hangs: the other answers
        found.append(await ready())
        second = asyncio.create_task(batcher.outputs([np.ones((1, 3), np.float32)]))
        found += [await until(503), await ready("/v2/health/live")]
        released.set()
        await asyncio.gather(first, second)
        found.append(await until(200))
        batcher.close()
        return found

    assert asyncio.run(states()) == [200, 200, 503, 200, 200]


def test_torch_models_load_and_answer_like_the_opened_artifact(
    mlp: EagerModel, tmp_path: Path
) -> None:
    context = Context(root=tmp_path)
    kinds = [
        ExportTorchScript().run_checked(mlp, context.with_root(tmp_path / "torchscript")),
        ExportProgram().run_checked(mlp, context.with_root(tmp_path / "graph")),
    ]
    inputs = mlp.signature.example(batch=5)
    for artifact in kinds:
        with open_model(artifact, "model", 1) as served, artifact.open() as predict:
            assert (served.kind, served.interface.rows_stay_first) == (artifact.kind, True)
            assert served.interface.outputs == (Tensor("logits", "float32", (-1, 3)),)
            (got,) = served.call(*(tensor.numpy() for tensor in inputs))
            assert np.array_equal(got, predict(*inputs)[0].numpy())
    refused = pytest.raises(ArtifactInvalid, match="is 'eager', expected one of onnx, aot")
    with refused, open_model(mlp, "model", 1):
        pass


def test_a_model_that_answers_nan_is_never_ready() -> None:
    with pytest.raises(StageFailed, match="answers NaN in y to normal inputs"):
        warm_up(lambda x: [x * np.nan], SIGNATURE)


@pytest.mark.parametrize(
    ("dtype", "moves", "seconds", "why"),
    [
        ("int32", "size", 0, ""),
        ("float32", "size", 0, "depend on"),
        ("int32", "neighbours", 0, "depend on"),
        ("int32", "neighbours", 0.05, "depend on"),  # of a dear call a few are made
        ("int32", "refusal", 0, "depend on"),
    ],
)
def test_invented_integers_say_only_whether_neighbours_change_answers(
    dtype: str, moves: str, seconds: float, why: str
) -> None:
    signature = Signature.model_validate(
        {"inputs": [{"name": "x", "shape": ["batch", 4], "dtype": dtype}]}
    )
    artifact: Any = SimpleNamespace(signature=signature, manifest=SimpleNamespace(lineage=()))

    def call(x: np.ndarray) -> list[np.ndarray]:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
        if moves == "refusal" and len(x) == 1:
            raise ValueError("one row")
        moved = 0.01 * {"size": len(x), "neighbours": float(x.sum()), "refusal": 0}[moves]
        return [x.sum(1, keepdims=True).astype(np.float32) + np.float32(moved)]

    of_val = BatchDependence(rows=8, source="val", calls=16)
    recorded = RecordedMeasurements(batch_dependence=of_val)
    found = recorded.why_not_joined(artifact, call, rows_stay_first=True)
    assert why in found and bool(found) == bool(why)
