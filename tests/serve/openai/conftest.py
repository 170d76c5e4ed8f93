"""A tiny decoder with a chat template, as a folder of `export_genai`, and servers of it."""

from collections.abc import Iterator

import pytest

from compress.artifacts.artifact import Artifact
from compress.export import ExportGenai
from compress.export.genai.runtime import GENAI
from tests.export.tiny_decoder import context_for, decoder
from tests.serve.openai.session_decoder import serving_by_session
from tests.serve.served_here import Served, serving

OPTIONS = ("--queue", "8", "--workers", "2", "--max-mib", "1")

CHAT_TEMPLATE = """
{%- for message in messages %}
{%- if message.role not in ("system", "user", "assistant") %}
{{- raise_exception("no such role: " + message.role) }}
{%- endif %}
{{- message.role[0] + ":" + message.content | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}a:{% endif %}"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("served")
    source = decoder(root / "llama", chat_template=CHAT_TEMPLATE)
    return ExportGenai()(source, context_for(source, root / "genai"))


@pytest.fixture(scope="session")
def genai_server(folder: Artifact) -> Iterator[Served]:
    if GENAI.missing():
        pytest.skip("to run these tests: pip install -e '.[genai]'")
    with serving(folder.path, *OPTIONS) as running:
        yield running


@pytest.fixture(scope="session")
def session_server(folder: Artifact) -> Iterator[Served]:
    with serving_by_session(folder, *OPTIONS) as running:
        yield running


@pytest.fixture(scope="module", params=["session_server", "genai_server"])
def server(request: pytest.FixtureRequest) -> Served:
    """Return a server that generates by onnxruntime alone, and one by onnxruntime-genai."""
    running: Served = request.getfixturevalue(request.param)
    return running
