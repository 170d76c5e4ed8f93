"""The handler without Java: TorchServe's own loader, context and request objects."""

import ast
import builtins
import dis
import importlib
import io
import json
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml
from onnx import TensorProto, helper

from compress.serve import worker
from compress.serve.packaging.provenance import digest_of
from compress.serve.torchserve.mar_file import MODULES, handler_text, mar_manifest
from compress.serve.worker.wire import JSON, NPY, NPZ, RAW, from_npz, from_raw, to_npz

ONE_INPUT = [{"name": "x", "shape": ["batch", 3], "dtype": "float32"}]
TWO_INPUTS = [
    {"name": "ids", "shape": ["batch", "time"], "dtype": "int64"},
    {"name": "mask", "shape": ["batch", "time"], "dtype": "bool"},
]


def write_onnx(folder: Path) -> None:
    """Write y = 1 / x: it answers NaN for no input, infinity for 0, and both for bad arithmetic."""
    value = helper.make_tensor_value_info
    x = value("x", TensorProto.FLOAT, ["batch", 3])
    y = value("y", TensorProto.FLOAT, ["batch", 3])
    nodes = [helper.make_node("Reciprocal", ["x"], ["y"])]
    graph = helper.make_graph(nodes, "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, folder / "model.onnx")


class Lookup(torch.nn.Module):
    """Two inputs, two outputs; an id outside the table is an error of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(10.0))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.table[ids] * mask, ids + 1


def write_torchscript(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit.* is deprecated")
        torch.jit.script(Lookup()).save(str(folder / "model.ts"))


def unpack(
    folder: Path,
    kind: str,
    payload: str,
    inputs: list[dict[str, Any]],
    probe: dict[str, Any],
    joins_rows: bool = True,
    **more: Any,
) -> None:
    """Lay out what TorchServe finds after unpacking a .mar."""
    names = {spec["name"] for spec in inputs}
    settings = {
        "kind": kind,
        "threads": 1,
        "max_rows": 8,
        "rows_stay_first": joins_rows,
        "joins_rows": joins_rows,
        "probe_atol": 1e-5,
        "inputs": inputs,
        "outputs": [name for name in probe if name not in names],
        "classes": None,
        **more,
    }
    (folder / "MAR-INF").mkdir()
    (folder / "MAR-INF" / "MANIFEST.json").write_bytes(mar_manifest("m", payload))
    (folder / "model-config.yaml").write_text(yaml.safe_dump({"handler": settings}))
    (folder / "probe.npz").write_bytes(to_npz(probe))
    (folder / "handler.py").write_bytes(handler_text())
    files = {f.relative_to(folder).as_posix(): f for f in folder.rglob("*") if f.is_file()}
    members = {name: digest_of(file).model_dump() for name, file in files.items()}
    (folder / "provenance.json").write_text(json.dumps({"members": members}))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return TorchServe's own way of loading an unpacked archive."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its version.txt open
        from ts.model_loader import TsModelLoader

    def loaded(folder: Path) -> Any:
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        sys.modules.pop("handler", None)
        return TsModelLoader().load("m", str(folder), "handler.py", None, 1, None)

    yield loaded
    sys.modules.pop("handler", None)


@pytest.fixture
def reciprocal(tmp_path: Path, load: Any) -> Any:
    write_onnx(tmp_path)
    x = np.array([[1, 2, 4], [8, 16, 32]], np.float32)
    unpack(tmp_path, "onnx", "model.onnx", ONE_INPUT, {"x": x, "y": 1 / x})
    return load(tmp_path)


@pytest.fixture
def lookup(tmp_path: Path, load: Any) -> Any:
    write_torchscript(tmp_path)
    ids = np.arange(6).reshape(2, 3)
    mask = ids % 2 == 0
    probe = {"ids": ids, "mask": mask, "value": (ids * mask).astype(np.float32), "next": ids + 1}
    unpack(tmp_path, "torchscript", "model.ts", TWO_INPUTS, probe)
    return load(tmp_path)


def ask(service: Any, *requests: tuple[str, Any, dict[str, str]]) -> list[SimpleNamespace]:
    """Send one batch through TorchServe's own request objects."""
    batch = [
        {
            "requestId": b"id",
            "parameters": [{"name": "body", "value": body, "contentType": content_type}],
            "headers": [
                {"name": k.encode(), "value": v.encode()}
                for k, v in {"Content-Type": content_type, **headers}.items()
            ],
        }
        for content_type, body, headers in requests
    ]
    processors, rows, ids = service.retrieve_data_for_inference(batch)
    context = service.context
    context.request_processor, context.request_ids = processors, ids
    answers = service._entry_point(rows, context)
    return [
        SimpleNamespace(
            status=processor.get_response_status_code(),
            phrase=processor.get_response_status_phrase(),
            headers=processor.get_response_headers(),
            body=answer,
        )
        for processor, answer in zip(processors, answers, strict=True)
    ]


def npz(**arrays: Any) -> tuple[str, bytes, dict[str, str]]:
    return NPZ, to_npz(arrays), {"Accept": NPZ}


X = np.array([[3, 5, 7]], np.float32)
FORMS = {
    "npz": (NPZ, to_npz({"x": X})),
    "npy": (NPY, None),
    "raw": (RAW, X.tobytes()),
    "no type": ("", X.tobytes()),
    "json list": (JSON, json.dumps(X.tolist()).encode()),
    "json named": (JSON, json.dumps({"inputs": {"x": X.tolist()}}).encode()),
    "json, already parsed by TorchServe": (JSON, X.tolist()),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_request_format_gets_the_same_bits(reciprocal: Any, form: str) -> None:
    content_type, body = FORMS[form]
    if form == "npy":
        stream = io.BytesIO()
        np.save(stream, X)
        body = stream.getvalue()
    request = (content_type, body)
    zipped, raw, text = ask(
        reciprocal,
        (*request, {"Accept": NPZ}),
        (*request, {"Accept": RAW}),
        (*request, {}),
    )
    expected = np.float32(1) / X
    assert np.array_equal(from_npz(zipped.body)["y"], expected)
    assert raw.headers["X-Shape"] == "1,3" and raw.headers["X-Dtype"] == "float32"
    assert np.array_equal(np.frombuffer(raw.body, "<f4").reshape(1, 3), expected)
    answer = json.loads(text.body)["outputs"]["y"]
    assert np.array_equal(np.array(answer, np.float32), expected)


def test_raw_bytes_need_x_shape_if_several_axes_vary() -> None:
    spec = {"name": "x", "shape": ["batch", "time"], "dtype": "float32"}
    body = np.arange(6, dtype=np.float32).tobytes()
    assert from_raw(body, {"x-shape": "2,3"}, spec).shape == (2, 3)
    with pytest.raises(ValueError, match=r"X-Shape is missing, expected the sizes of .*time"):
        from_raw(body, {}, spec)
    with pytest.raises(ValueError, match="X-Shape is 'two,3', expected sizes"):
        from_raw(body, {"x-shape": "two,3"}, spec)


def test_a_compressed_npz_is_refused_as_compressed() -> None:
    stream = io.BytesIO()
    np.savez_compressed(stream, x=np.ones((1, 100), np.float32))
    with pytest.raises(ValueError, match=r"compressed: write it with numpy\.savez"):
        from_npz(stream.getvalue())


def pickled() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([{}], object), allow_pickle=True)
    return stream.getvalue()


def compressed() -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, x=X)
    return stream.getvalue()


REFUSED = {
    "type not taken": ("text/plain", b"1", 415, "application/x-npz"),
    "not json": (JSON, b"[[1, 2", 400, "not JSON"),
    "deep json": (JSON, b"[" * 100_000, 400, "too deeply"),
    "words": (JSON, b'[["a", "b", "c"]]', 400, "not float32"),
    "ragged": (JSON, b"[[1, 2], [1]]", 400, "inhomogeneous"),
    "json NaN": (JSON, b"[[NaN, 1, 2]]", 400, "holds NaN"),
    "json number": (JSON, b"3", 400, "inputs"),
    "other name": (JSON, b'{"inputs": {"y": [[1, 2, 3]]}}', 400, "expected ['x']"),
    "bytes that do not fit": (RAW, b"123", 400, "3 bytes as application/octet-stream"),
    "rows that do not fit": (RAW, b"1234", 400, "4 bytes as application/octet-stream"),
    "empty": (RAW, b"", 400, "the body is empty"),
    "no rows": (JSON, b"[]", 400, "x has shape [0], expected ['batch', 3]"),
    "infinity": (NPZ, to_npz({"x": X * np.inf}), 400, "holds infinity"),
    "JSON of infinity": (JSON, b"[[1e999, 1, 2]]", 400, "holds infinity"),
    "JSON's word for it": (JSON, b"[[Infinity, 1, 2]]", 400, "x holds infinity"),
    "npz is not npz": (NPZ, b"hello", 400, "not a zip"),
    "other shape": (NPZ, to_npz({"x": X[:, :2]}), 400, "[1, 2], expected ['batch', 3]"),
    "other type": (NPZ, to_npz({"x": X.astype(np.float64)}), 400, "float64, expected float32"),
    "NaN": (NPZ, to_npz({"x": X * np.nan}), 400, "holds NaN"),
    "too many rows": (NPZ, to_npz({"x": np.ones((9, 3), np.float32)}), 413, "at most 8"),
    "pickle": (NPY, pickled(), 400, "allow_pickle"),
    "compressed": (NPZ, compressed(), 400, "compressed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_request_does_not_affect_its_batch(reciprocal: Any, case: str) -> None:
    content_type, body, status, words = REFUSED[case]
    before, bad, after = ask(reciprocal, npz(x=X), (content_type, body, {}), npz(x=X * 2))
    assert bad.status == status and bad.phrase.isascii()
    assert bad.headers["content-type"] == JSON
    assert json.loads(bad.body)["code"] == status
    assert words in json.loads(bad.body)["message"]
    assert before.status == after.status == 200
    assert np.array_equal(from_npz(after.body)["y"], 1 / (X * 2))


def test_infinity_is_answered_losslessly_and_refused_in_json(reciprocal: Any) -> None:
    zero = X * 0
    zipped, text = ask(reciprocal, npz(x=zero), (NPZ, to_npz({"x": zero}), {}))
    assert np.isinf(from_npz(zipped.body)["y"]).all()
    assert text.status == 406 and "JSON" in json.loads(text.body)["message"]


def test_infinite_inputs_are_accepted_if_the_recorded_ones_have_them(
    tmp_path: Path, load: Any
) -> None:
    write_onnx(tmp_path)
    x = np.array([[1, 2, np.inf]], np.float32)
    inputs = [{**ONE_INPUT[0], "not_finite": ["infinities"]}]
    unpack(tmp_path, "onnx", "model.onnx", inputs, {"x": x, "y": 1 / x})
    taken, refused = ask(load(tmp_path), npz(x=x), npz(x=x * np.nan))
    assert from_npz(taken.body)["y"].tolist() == [[1, 0.5, 0]]
    assert refused.status == 400 and "holds NaN" in refused.body


def test_a_worker_with_a_damaged_member_is_never_ready(tmp_path: Path, load: Any) -> None:
    write_onnx(tmp_path)
    x = np.ones((1, 3), np.float32)
    unpack(tmp_path, "onnx", "model.onnx", ONE_INPUT, {"x": x, "y": x})
    with (tmp_path / "model.onnx").open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(RuntimeError, match=r"member model\.onnx is not the file that was packed"):
        load(tmp_path)


def test_an_answer_with_nan_is_refused_in_every_form(reciprocal: Any) -> None:
    model = reciprocal._entry_point.__self__
    run, bad = model.run, X.copy()
    bad[0, 0] = 1.5
    model.run = lambda arrays: [np.where(arrays[0] == 1.5, np.float32("nan"), run(arrays)[0])]
    asked = [(NPZ, to_npz({"x": bad}), {"Accept": form}) for form in (NPZ, RAW, JSON)]
    *refused, good = ask(reciprocal, *asked, npz(x=X))
    assert [answer.status for answer in refused] == [422] * 3 and good.status == 200
    assert "cannot answer these values: it answers NaN" in refused[0].body
    model.run = lambda arrays: [run(arrays)[0] * np.float32("nan")]
    (broken,) = ask(reciprocal, npz(x=X))
    assert broken.status == 500 and "does not work any more" in broken.body


def test_a_request_without_a_body_is_refused(reciprocal: Any) -> None:
    batch = [{"requestId": b"id", "parameters": [], "headers": []}]
    processors, rows, _ = reciprocal.retrieve_data_for_inference(batch)
    reciprocal.context.request_processor = processors
    (answer,) = reciprocal._entry_point(rows, reciprocal.context)
    assert processors[0].get_response_status_code() == 400 and "no body" in answer


def test_several_inputs_and_outputs_keep_their_names_and_types(lookup: Any) -> None:
    ids = np.array([[3, 4]])
    mask = np.array([[True, False]])
    zipped, text, raw = ask(
        lookup,
        npz(mask=mask, ids=ids),
        (JSON, json.dumps({"inputs": {"ids": [[3, 4]], "mask": [[1, 0]]}}).encode(), {}),
        (RAW, ids.tobytes(), {}),
    )
    answer = from_npz(zipped.body)
    assert answer["value"].tolist() == [[3.0, 0.0]] and answer["value"].dtype == np.float32
    assert answer["next"].tolist() == [[4, 5]] and answer["next"].dtype == np.int64
    assert json.loads(text.body) == {"outputs": {"value": [[3.0, 0.0]], "next": [[4, 5]]}}
    assert raw.status == 415
    (bare,) = ask(lookup, (NPZ, to_npz({"ids": ids, "mask": mask}), {"Accept": RAW}))
    assert bare.status == 406 and "2 outputs" in bare.body
    (fraction,) = ask(lookup, (JSON, b'{"inputs": {"ids": [[1.5]], "mask": [[1]]}}', {}))
    assert fraction.status == 400 and "not int64" in fraction.body
    (uneven,) = ask(lookup, npz(ids=ids, mask=mask[:, :1]))
    assert uneven.status == 400 and "mask has shape [1, 1]" in uneven.body


def test_equal_shapes_are_batched_and_an_error_fails_one_request(lookup: Any) -> None:
    model = lookup._entry_point.__self__
    calls: list[tuple[int, ...]] = []
    run = model.run
    model.run = lambda arrays: (calls.append(arrays[0].shape), run(arrays))[1]

    def request(*rows: list[int]) -> tuple[str, bytes, dict[str, str]]:
        return npz(ids=np.array(rows), mask=np.ones((len(rows), len(rows[0])), bool))

    one, two, longer = ask(lookup, request([1, 2]), request([3, 4], [5, 6]), request([1, 2, 3]))
    assert sorted(calls) == [(1, 3), (3, 2)]
    assert from_npz(one.body)["value"].tolist() == [[1, 2]]
    assert from_npz(two.body)["value"].tolist() == [[3, 4], [5, 6]]
    assert from_npz(longer.body)["value"].tolist() == [[1, 2, 3]]
    good, bad, last = ask(lookup, request([1, 2]), request([3, 999]), request([7, 8]))
    assert (good.status, bad.status, last.status) == (200, 422, 200)
    assert "cannot answer these values" in bad.body
    assert from_npz(last.body)["value"].tolist() == [[7, 8]]


def test_joined_requests_of_different_row_counts_get_their_own_rows(lookup: Any) -> None:
    counts = (3, 1, 2)
    sent = [np.arange(2 * count).reshape(count, 2) + i for i, count in enumerate(counts)]
    answers = ask(lookup, *(npz(ids=ids, mask=np.ones(ids.shape, bool)) for ids in sent))
    for ids, answer in zip(sent, answers, strict=True):
        assert np.array_equal(from_npz(answer.body)["next"], ids + 1)
        assert answer.headers["X-Batch-Axis"] == "0"


def test_requests_that_must_not_be_joined_run_one_by_one(tmp_path: Path, load: Any) -> None:
    write_onnx(tmp_path)
    x = np.ones((2, 3), np.float32)
    fixed = [{"name": "x", "shape": [2, 3], "dtype": "float32"}]
    unpack(tmp_path, "onnx", "model.onnx", fixed, {"x": x, "y": x}, joins_rows=False)
    service = load(tmp_path)
    model = service._entry_point.__self__
    calls: list[tuple[int, ...]] = []
    run = model.run
    model.run = lambda arrays: (calls.append(arrays[0].shape), run(arrays))[1]
    answers = ask(service, npz(x=x), npz(x=x * 2), npz(x=x[:1]))
    assert [a.status for a in answers] == [200, 200, 400]
    assert calls == [(2, 3), (2, 3)]
    assert "X-Batch-Axis" not in answers[0].headers


@pytest.mark.parametrize("wrong", ["values", "type"])
def test_a_model_whose_outputs_differ_from_the_probe_does_not_load(
    tmp_path: Path, load: Any, wrong: str
) -> None:
    write_onnx(tmp_path)
    x = np.ones((2, 3), np.float32)
    y = x + 1 if wrong == "values" else x.astype(np.float64)
    unpack(tmp_path, "onnx", "model.onnx", ONE_INPUT, {"x": x, "y": y})
    with pytest.raises(RuntimeError, match="does not answer the probe as packaged"):
        load(tmp_path)


def test_the_joined_handler_is_one_class_and_imports_nothing_of_ours_nor_torch_for_onnx(
    tmp_path: Path, fresh_process: Any
) -> None:
    (tmp_path / "handler.py").write_bytes(handler_text())
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import handler; "
        "ours = {'compress', 'export', 'serve', 'torch', 'onnxruntime', 'ts'} & set(sys.modules); "
        "classes = [n for n, v in vars(handler).items() "
        "if isinstance(v, type) and v.__module__ == 'handler']; print(sorted(ours), classes)"
    )
    assert fresh_process(code) == "[] ['PackagedModel']"


def test_every_name_in_the_joined_handler_is_bound_there_once() -> None:
    tree = ast.parse(handler_text())
    bound = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    assert len(bound) == len(set(bound)) > 10
    modules = {p.stem for p in Path(worker.__file__).parent.glob("*.py")} - {"__init__"}
    assert {f"compress.serve.worker.{name}" for name in modules} < set(MODULES)
    scope: dict[str, Any] = {"__name__": "joined"}
    whole = compile(tree, "handler.py", "exec")
    exec(whole, scope)
    codes, used = [whole], set[str]()
    while codes:
        code = codes.pop()
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
        used |= {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    assert {"decode", "LOADERS"} <= used and used <= {*scope, *dir(builtins)}


def test_an_npz_with_an_array_twice_is_refused() -> None:
    stream = io.BytesIO(to_npz({"x": np.ones(2)}))
    with zipfile.ZipFile(stream, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("x.npy", archive.read("x.npy"))
    with pytest.raises(ValueError, match="holds x twice"):
        from_npz(stream.getvalue())


def test_numpy_reads_our_npz_under_any_name() -> None:
    arrays = {"file": X, "a/b": np.arange(3), "flag": np.array(True), "t": X.T}
    data = to_npz(arrays)
    with np.load(io.BytesIO(data)) as read:
        assert all(np.array_equal(read[name], array) for name, array in arrays.items())
    assert data == to_npz(arrays)
    assert {m.date_time[0] for m in zipfile.ZipFile(io.BytesIO(data)).infolist()} == {1980}
    assert all(np.array_equal(from_npz(data)[name], array) for name, array in arrays.items())
