"""Folders whose files name what lies elsewhere: nothing outside is read, no network is asked."""

import shutil
import socket
import sys
from functools import partial

import pytest

from benchmarks.attack import cases_folders
from compress.artifacts import hf_folder
from compress.artifacts.artifact import Artifact
from compress.artifacts.hf_folder import (
    build,
    files_to_carry,
    folder_digest,
    offline,
    read_architecture,
    read_folder,
)
from compress.artifacts.libraries.timm_model import build as build_timm
from compress.checkpoint.loading import read_state_dict
from compress.common.errors import ArtifactInvalid
from compress.export.genai.runtime import open_folder
from compress.pipelines.config.model_spec import TIMM

pytest.importorskip("transformers")

EXPECTED = {
    "index_of_weights_outside": r"'\.\./outside/model\.safetensors', expected a file beside it",
    "index_of_weights_by_an_absolute_path": "expected a file beside it",
    "index_of_a_link_outside": "part.safetensors: is a link that leads out of its folder",
    "weights_are_a_link_outside": "model.safetensors: is a link that leads out of its folder",
    "config_is_a_link_outside": "config.json: is a link that leads out of its folder",
    "tokenizer_is_a_link_outside": "tokenizer.json: is a link that leads out of its folder",
    "templates_are_a_link_outside": "additional_chat_templates: is a link that leads out",
    "weights_are_a_link_to_itself": "model.safetensors: Symlink loop",
    "snapshot_whose_blobs_are_elsewhere": "model.safetensors: is a link that leads out of its",
    "backbone_of_a_hub": "backbone: names 'evil/backbone', which is not read",
    "backbone_of_a_name_that_a_hub_is_asked_for": "asks for huggingface.co, and nothing is down",
    "backbone_of_timm_on_a_hub": "backbone: names 'hf-hub:evil/backbone'",
    "architecture_of_timm_in_another_folder": "architecture: names 'local-dir:",
    "checkpoint_of_timm_in_another_folder": "checkpoint_path: names '/",
    "attention_of_a_hub_in_a_part": "attn_implementation: names 'evil/attention'",
    "adapter_of_another_model": "it is an adapter of PEFT; merge it",
    "code_of_its_own": "transformers cannot read it: ValueError",
}
GENAI = {
    "genai_with_a_library": "session_options.custom_ops_library: unknown entry",
    "genai_with_a_profile": "session_options.enable_profiling: unknown entry",
    "genai_with_a_provider": "session_options.provider_options: ",
}


@pytest.mark.parametrize("case", EXPECTED)
def test_a_folder_that_names_what_is_elsewhere_is_refused_in_a_line(tmp_path, case) -> None:
    folder = getattr(cases_folders, case)(tmp_path)
    for read in (partial(read_folder, untrained_head=True), read_architecture):
        with pytest.raises(ArtifactInvalid, match=EXPECTED[case]) as refused:
            read(folder, None)
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("case", GENAI)
def test_settings_that_nobody_exported_are_refused_before_the_runtime_is_loaded(
    tmp_path, case
) -> None:
    folder = getattr(cases_folders, case)(tmp_path)
    with pytest.raises(ArtifactInvalid, match=f"genai_config.json: model.decoder.{GENAI[case]}"):
        open_folder(folder)
    assert not (tmp_path / "ran").exists()


def test_a_snapshot_of_the_hubs_cache_is_read_through_its_links(tmp_path) -> None:
    model = cases_folders._bert(tmp_path)
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "1", tmp_path / "cache" / "blobs"
    for place in (snapshot, blobs):
        place.mkdir(parents=True)
    for file in model.iterdir():
        shutil.move(file, blobs / f"blob of {file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob of {file.name}")
    _, module = read_folder(snapshot, None, untrained_head=False)
    assert "tokenizer.json" in files_to_carry(snapshot, module)
    assert folder_digest(snapshot)
    assert len(read_state_dict(snapshot)) == len(module.state_dict())


def test_a_checkpoints_folder_is_not_left_by_a_link(tmp_path) -> None:
    folder = cases_folders.weights_are_a_link_outside(tmp_path)
    with pytest.raises(ArtifactInvalid, match="is a link that leads out of its folder"):
        read_state_dict(folder)
    assert folder_digest(folder) is None
    assert read_state_dict((folder / "model.safetensors").resolve())  # named by the user


def test_a_config_in_a_manifest_is_refused_as_that_of_a_folder() -> None:
    inner = {"model_type": "timm_backbone", "backbone": "hf-hub:evil/backbone"}
    with pytest.raises(ArtifactInvalid, match="backbone: names 'hf-hub:evil/backbone'"):
        build("UperNetForSemanticSegmentation", {"backbone_config": inner})
    with pytest.raises(ArtifactInvalid, match=r"asks for .*, and nothing is downloaded"):
        build("UperNetForSemanticSegmentation", {"backbone": "evilbackbone"})


@pytest.mark.skipif(TIMM.missing(), reason=f"to run this test: {TIMM.install}")
def test_a_timm_name_in_a_manifest_downloads_and_reads_nothing() -> None:
    for name, arguments in (("hf-hub:a/b", {}), ("resnet18", {"checkpoint_path": "/a/b.pth"})):
        with pytest.raises(ArtifactInvalid, match="which is not read"):
            build_timm(name, **arguments)
    with pytest.raises(ArtifactInvalid, match=r"resnet18: asks for .*, and nothing is downloaded"):
        build_timm("resnet18", pretrained=True)


def test_a_packed_model_is_built_by_no_other_function(tmp_path) -> None:
    made = cases_folders.packed_by_a_function_of_the_standard_library(tmp_path)
    with pytest.raises(ArtifactInvalid, match="the manifest needs a recipe of compress"):
        Artifact.from_directory(made).load()
    assert not (tmp_path / "ran").exists()


def test_only_other_machines_are_out_of_reach_and_only_in_the_block() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with (
            offline("m"),
            socket.socket() as client,
            pytest.raises(ArtifactInvalid, match=r"m: asks for 127\.0\.0\.1"),
        ):
            client.connect(server.getsockname())
        with socket.socket() as client:
            client.connect(server.getsockname())
    with offline("m"), socket.socket(socket.AF_UNIX) as client, pytest.raises(OSError, match="No"):
        client.connect("/nowhere/socket")


def test_the_watch_for_connections_is_silent_when_modules_are_taken_apart(monkeypatch) -> None:
    with offline("m"):
        pass
    for name in ("LOOKUPS", "CONNECTIONS", "_reading"):
        monkeypatch.setattr(hf_folder, name, None)  # as at the end of Python
    sys.audit("compress.test")
