from collections.abc import Callable

from compress.artifacts.eager_model import EagerModel


def test_any_kind_is_known_in_a_fresh_process(
    mlp: EagerModel, fresh_process: Callable[[str], str]
) -> None:
    proven = fresh_process(
        f"from compress.serve.verify import verify\nprint(verify({str(mlp.path)!r}))"
    )
    assert f"eager artifact, digest {mlp.digest}" in proven
