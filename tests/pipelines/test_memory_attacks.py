"""Models whose files ask for far more memory or time than their size explains are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.attack import cases_memory as cases
from compress.artifacts import hf_folder
from compress.common.errors import ArtifactInvalid
from compress.common.foreign import child_process
from compress.pipelines.commands.check import check_pipeline
from compress.profiling.rss import memory_kib, reset_peak

QUICK = {
    *("pt_bytearray", "pt_shared_parts", "pt_contains_itself", "dcp_memo_index", "dcp_chunk"),
    *("safetensors_hole", "onnx_constant_of_shape", "ts_sizes"),
}
LARGE = {"hf_tokenizer", "hf_large_config", "safetensors_many"}
"""Of real bytes, which take long to write."""


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower what is asked for and the limits, so that a test that fails does not take 12 GiB."""
    monkeypatch.setattr(cases, "HUGE", 2**30)
    monkeypatch.setattr(cases, "SEVERAL", 2**28)
    monkeypatch.setattr(child_process, "MEMORY", 2**28)
    monkeypatch.setattr(child_process, "SECONDS", 6)


@pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks",
    "ignore:torch.distributed is disabled",
    "ignore:`torch.jit",
)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.__name__ in QUICK else pytest.mark.soak)
        for case in cases.MODELS
        if case.__name__ not in LARGE
    ],
)
def test_a_model_that_asks_for_too_much_is_refused(
    case: Callable[[Path], Path], tmp_path: Path
) -> None:
    file = cases.pipeline_for(case(tmp_path))
    reset_peak()
    before = memory_kib("VmRSS")
    with pytest.raises(ArtifactInvalid) as refused:
        check_pipeline(file, models=True)
    assert "\n" not in str(refused.value)
    assert memory_kib("VmHWM") - before < 2**19, "KiB"


def test_a_config_of_any_size_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hf_folder, "CONFIG_BYTES", 100)
    model = cases.hf_labels(tmp_path)
    with pytest.raises(ArtifactInvalid, match=r"config\.json: has more than 100 bytes"):
        hf_folder.refuse_foreign_folder(model)


@pytest.mark.slow
def test_a_tokenizer_of_any_size_is_not_carried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    monkeypatch.setattr(hf_folder, "PROCESSOR_BYTES", 10_000)
    model = BertForSequenceClassification(BertConfig(**cases.BERT))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("[" + "1," * 10_000 + "1]")
    files = hf_folder.files_to_carry(tmp_path / "model", model)
    assert [*files] == ["config.json"]
    assert "its tokenizer is not carried" in caplog.text
    assert "more than 10000 bytes" in caplog.text
