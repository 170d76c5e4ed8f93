"""NVIDIA's client against the built-in server, as its users write it."""

from collections.abc import Iterator

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from tests.serve.served_here import TOKEN, Served, sealed, serving

ROWS = np.array([[0, 3, 1.5, -2], [0, 1, 2, 3]], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(sealed(tmp_path_factory.mktemp("clients") / "model").path) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[InferenceServerClient]:
    """One connection, which is kept."""
    client = InferenceServerClient(server.url.removeprefix("http://"), concurrency=1)
    yield client
    client.close()


def headers() -> dict[str, str]:
    """Return new ones: the client adds to those that it is given, and leaves it there."""
    return {"Authorization": f"Bearer {TOKEN}"}


def given(rows: np.ndarray, *, binary: bool) -> InferInput:
    tensor = InferInput("x", list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows, binary_data=binary)
    return tensor


def test_json_and_binary_in_turn(client: InferenceServerClient) -> None:
    """Requests and answers as JSON come without a Content-Type."""
    assert client.is_server_live()
    assert client.get_model_metadata("model", headers=headers())["inputs"][0]["datatype"] == "FP32"
    for sent, asked in ((False, False), (True, False), (False, True), (True, True)) * 3:
        outputs = [InferRequestedOutput(name, binary_data=asked) for name in ("double", "looked")]
        answer = client.infer(
            "model", [given(ROWS, binary=sent)], outputs=outputs, headers=headers(), request_id="7"
        )
        assert np.array_equal(answer.as_numpy("double"), 2 * ROWS)
        assert np.array_equal(answer.as_numpy("looked"), [3, 1])
        assert answer.get_response()["id"] == "7"


def test_all_outputs_where_none_is_named(client: InferenceServerClient) -> None:
    answer = client.infer("model", [given(ROWS, binary=True)], headers=headers())
    assert [output["name"] for output in answer.get_response()["outputs"]] == [
        *("double", "zero", "looked")
    ]


def test_errors_carry_the_servers_message(client: InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="no valid token"):
        client.infer("model", [given(ROWS, binary=False)])
    with pytest.raises(InferenceServerException, match="out of data bounds"):
        client.infer("model", [given(ROWS + 9990, binary=False)], headers=headers())
    assert client.infer("model", [given(ROWS, binary=False)], headers=headers())
