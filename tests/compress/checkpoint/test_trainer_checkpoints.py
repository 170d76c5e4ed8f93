"""Checkpoints of Lightning, DeepSpeed, Accelerate and Hugging Face's Trainer.

Their structure is that of lightning 2.6.6, deepspeed 0.19.8, accelerate 1.15.0 and transformers 5,
written here by torch alone.
"""

import functools
import json
import logging
import subprocess
from collections import OrderedDict, defaultdict, deque
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.checkpoint.loading import checkpoint_digest, match_names, read_state_dict
from compress.checkpoint.state_dict import in_memory
from compress.common.errors import ArtifactInvalid
from compress.common.signature import Signature, TensorSpec

SIGNATURE = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))


def _state(prefix: str = "") -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    return {prefix + name: tensor for name, tensor in net.state_dict().items()}


def _imported(tmp_path: Path, project: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    model = import_checkpoint(
        tmp_path / "in",
        Recipe(factory="nets:mlp"),
        SIGNATURE,
        checkpoint=checkpoint,
        folder=project,
    )
    return model.load().state_dict()


def _assert_equal(found, expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(in_memory(found[name]), tensor), name


class Settings:
    """A class of hyperparameters; its module is taken away from its name while it is read."""

    def __init__(self) -> None:
        self.path = Path("/data")

    def __setstate__(self, state: dict[str, object]) -> None:
        raise AssertionError("was unpickled")


class Attributes(dict):
    """As Lightning's AttributeDict."""


class Slots:
    __slots__ = ("width",)


def _lightning(weights: dict[str, torch.Tensor], **more: object) -> dict[str, object]:
    slots = Slots()
    slots.width = 3
    return {
        "epoch": 1,
        "global_step": 4,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": OrderedDict(weights),
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5), "dirpath": "x"}},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(4.0)}}, "param_groups": []}],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {
            "settings": Settings(),
            "attributes": Attributes(lr=0.1),
            "optimizer": functools.partial(torch.optim.AdamW, lr=0.1),
            "slots": slots,
            "counts": defaultdict(int, {"a": 1}),
            **more,
        },
    }


def test_a_lightning_checkpoint_is_read_without_its_hyperparameters(
    tmp_path: Path, project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "best.ckpt"
    torch.save(_lightning(_state("model.") | {"criterion.weight": torch.ones(3)}), file)
    with caplog.at_level(logging.INFO):
        _assert_equal(_imported(tmp_path, project, file), _state())
    assert "without the prefix 'model.'" in caplog.text
    assert "'criterion.weight'" in caplog.text


@pytest.mark.parametrize(
    "prefix",
    ["net.", "model.module.", "model._orig_mod.", "_forward_module.model.", "module._orig_mod."],
)
def test_any_prefix_that_fits_is_stripped(tmp_path: Path, project: Path, prefix: str) -> None:
    torch.save(_lightning(_state(prefix)), tmp_path / "last.ckpt")
    _assert_equal(_imported(tmp_path, project, tmp_path / "last.ckpt"), _state())


def test_names_of_compiled_blocks_match() -> None:
    state = {name.replace(".", "._orig_mod."): tensor for name, tensor in _state("model.").items()}
    _assert_equal(match_names(state, _state(), "checkpoint x"), _state())


def test_two_prefixes_that_fit_are_refused(tmp_path: Path, project: Path) -> None:
    torch.save(_lightning(_state("model.") | _state("teacher.")), tmp_path / "two.ckpt")
    with pytest.raises(ArtifactInvalid, match=r"under 'model\.' and 'teacher\.'"):
        _imported(tmp_path, project, tmp_path / "two.ckpt")


def test_another_head_is_named_without_the_prefix(tmp_path: Path, project: Path) -> None:
    state = _state("model.") | {"model.2.weight": torch.ones(5, 16), "model.2.bias": torch.ones(5)}
    torch.save(_lightning(state), tmp_path / "head.ckpt")
    with pytest.raises(
        ArtifactInvalid, match=r"shape of 2\.weight: \(5, 16\) instead of \(3, 16\)"
    ):
        _imported(tmp_path, project, tmp_path / "head.ckpt")


class _Call:
    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [eval, exec, subprocess.call, __import__])
def test_functions_that_run_programs_are_refused(tmp_path: Path, function: object) -> None:
    file = tmp_path / "evil.ckpt"
    torch.save(_lightning(_state("model."), hook=_Call(function, "raise SystemExit")), file)
    with pytest.raises(ArtifactInvalid, match=r"names .* never executed"):
        read_state_dict(file)


CALLED: list[object] = []


def test_no_function_of_a_pickle_is_called(tmp_path: Path) -> None:
    # One that no list of names knows: it becomes a placeholder.
    torch.save(_lightning(_state(), hook=_Call(CALLED.append, 1)), tmp_path / "method.ckpt")
    torch.save(_lightning(_state(), hook=_Call(_record, 1)), tmp_path / "function.ckpt")
    for name in ("method", "function"):
        try:
            _assert_equal(read_state_dict(tmp_path / f"{name}.ckpt"), _state())
        except ArtifactInvalid as error:
            assert "never executed" in str(error)
    assert CALLED == []


def _record(value: object) -> None:
    CALLED.append(value)


def test_a_pickle_that_cannot_be_skipped_is_one_line(tmp_path: Path) -> None:
    torch.save(_lightning(_state(), losses=deque([1.0, 2.0])), tmp_path / "deque.ckpt")
    with pytest.raises(ArtifactInvalid, match=r"pickled code .*but got .*deque.*torch\.save\("):
        read_state_dict(tmp_path / "deque.ckpt")


def _write_sharded_bin(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    files = {}
    for number, (name, tensor) in enumerate(_state().items()):
        files[name] = f"pytorch_model-{number + 1:05}-of-00004.bin"
        torch.save({name: tensor}, folder / files[name])
    index = {"metadata": {"total_size": 460}, "weight_map": files}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def test_a_sharded_bin_is_read_and_all_its_files_count(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-500"
    _write_sharded_bin(folder)
    torch.save(Settings(), folder / "training_args.bin")  # the Trainer's, and never opened
    _assert_equal(read_state_dict(folder), _state())
    _assert_equal(read_state_dict(folder / "pytorch_model.bin.index.json"), _state())
    before = checkpoint_digest(folder)
    last = folder / "pytorch_model-00004-of-00004.bin"
    torch.save({"2.bias": torch.zeros(3)}, last)
    assert checkpoint_digest(folder) != before
    torch.save({"other": torch.zeros(3)}, last)
    with pytest.raises(ArtifactInvalid, match=r"2\.bias is not in pytorch_model-00004"):
        read_state_dict(folder)
    shaped = OrderedDict[str, int]()
    shaped.shape = (3,)  # type: ignore[attr-defined]  # torch restores attributes of these alone
    torch.save({"2.bias": shaped}, last)
    with pytest.raises(ArtifactInvalid, match=r"2\.bias is not in pytorch_model-00004"):
        read_state_dict(folder)
    torch.save({"2.bias": _Call(eval, "raise SystemExit")}, last)
    with pytest.raises(ArtifactInvalid, match=r"names builtins\.eval"):
        read_state_dict(folder)
    last.unlink()
    with pytest.raises(ArtifactInvalid, match="pytorch_model-00004"):
        read_state_dict(folder)


def test_accelerates_fsdp_folders_are_read(tmp_path: Path) -> None:
    sharded, full = tmp_path / "sharded", tmp_path / "full"
    sharded.mkdir()
    full.mkdir()
    dcp.save({"model": _state()}, checkpoint_id=sharded / "pytorch_model_fsdp_0", no_dist=True)
    torch.save(_state(), full / "pytorch_model_fsdp.bin")
    for folder in (sharded, full):
        (folder / "random_states_0.pkl").write_bytes(b"never opened")
        _assert_equal(read_state_dict(folder), _state())
        assert checkpoint_digest(folder)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_model.safetensors", "merge_and_unload"),
        ("pytorch_model_fsdp_rank0.bin", "SHARDED_STATE_DICT"),
        ("checkpoint-500", "such as checkpoint-500"),
        ("last.ckpt", r"such as last\.ckpt"),
    ],
)
def test_directories_that_cannot_be_read_say_what_to_do(
    tmp_path: Path, file: str, message: str
) -> None:
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(ArtifactInvalid, match=message):
        read_state_dict(tmp_path)


class ZeroStageEnum(Settings):
    """Of DeepSpeed, and so unknown here."""


def _flat(state: dict[str, torch.Tensor], names: list[str], multiple: int) -> torch.Tensor:
    flat = torch.cat([state[name].flatten() for name in names])
    return nn.functional.pad(flat, (0, -len(flat) % multiple))


def _write_zero(folder: Path, stage: int, ranks: int = 2) -> dict[str, torch.Tensor]:
    """Write what DeepSpeed does for two groups of weights, a frozen, a tied one and a buffer."""
    state = _state() | {"frozen": torch.arange(5.0), "steps": torch.tensor(3)}
    groups = [["0.weight", "2.weight"], ["0.bias", "2.bias"]]
    tag = folder / "global_step3"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    stand_ins = {name: torch.empty(0) for name in state} if stage == 3 else dict(state)
    frozen = nn.functional.pad(state["frozen"], (0, -5 % ranks)).chunk(ranks)
    for rank in range(ranks):
        model = {
            "module": OrderedDict(stand_ins) | {"steps": state["steps"]},
            "buffer_names": ["steps"],
            "param_shapes": [OrderedDict((n, state[n].shape) for n in names) for names in groups],
            "frozen_param_shapes": {"frozen": torch.Size([5])},
            "frozen_param_fragments": {"frozen": frozen[rank] if stage == 3 else state["frozen"]},
            "shared_params": {"tied": "0.bias"},
            "ds_version": "0.19.8",
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        if stage == 3:
            torch.save(model, tag / f"{name}_model_states.pt")
            each = [_flat(state, [n], ranks).chunk(ranks)[rank] for g in groups for n in g]
            # DeepSpeed's own groups do not end where weights do.
            parts = {"fp32_flat_groups": list(torch.cat(each).split(30)), "partition_count": ranks}
        else:
            if rank == 0:
                torch.save(model, tag / "mp_rank_00_model_states.pt")
            flats = [_flat(state, names, 2 * ranks).chunk(ranks)[rank] for names in groups]
            parts = {"single_partition_of_fp32_groups": flats, "partition_count": [ranks, ranks]}
        optimizer = {**parts, "zero_stage": ZeroStageEnum(), "loss_scaler": Settings()}
        torch.save({"optimizer_state_dict": optimizer}, tag / f"{name}_optim_states.pt")
    return state | {"tied": state["0.bias"]}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("ranks", [2, 11])
def test_zero_checkpoints_are_put_together(tmp_path: Path, stage: int, ranks: int) -> None:
    expected = _write_zero(tmp_path / "run", stage, ranks)
    _assert_equal(read_state_dict(tmp_path / "run"), expected)
    _assert_equal(read_state_dict(tmp_path / "run/global_step3"), expected)
    before = checkpoint_digest(tmp_path / "run")
    files = sorted((tmp_path / "run/global_step3").glob("*_optim_states.pt"))
    files[-1].unlink()
    assert checkpoint_digest(tmp_path / "run") != before
    with pytest.raises(ArtifactInvalid, match=rf"{ranks - 1} of {ranks} files.*zero_to_fp32\.py"):
        read_state_dict(tmp_path / "run")


def test_a_planted_zero_checkpoint_is_refused(tmp_path: Path) -> None:
    _write_zero(tmp_path, 2)
    file = tmp_path / "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": _Call(eval, "raise SystemExit")}, file)
    with pytest.raises(ArtifactInvalid, match=r"names builtins\.eval"):
        read_state_dict(tmp_path)
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(ArtifactInvalid, match="expected a file beside it"):
        read_state_dict(tmp_path)


def test_a_model_that_deepspeed_split_is_refused(tmp_path: Path) -> None:
    _write_zero(tmp_path, 2)
    (tmp_path / "global_step3/mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(ArtifactInvalid, match="ds_to_universal"):
        read_state_dict(tmp_path)
