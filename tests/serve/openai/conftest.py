"""A tiny decoder with a chat template, as a folder of `export_genai`."""

import pytest

from compress.artifacts.artifact import Artifact
from export import ExportGenai
from tests.export.tiny_decoder import context_for, decoder

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
