"""Every model of the zoo: pruned, proven here once more, exported, and loaded in a fresh process.

The proof in this file shares nothing with the toolkit's: zeros are written by hand, on inputs and
batch sizes that the toolkit did not see.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.common.forward import run_in_eval
from compress.core.context import Context
from compress.export.onnx.stage import ExportOnnx
from compress.pruning.prune_channels import PruneChannels
from tests.compress.pruning.zoo.registry import CASES, Case, name_outputs

ROUND_TO = {0.25: 1, 0.5: 16}
CUT_UNEVENLY = (
    *("shuffled", "grouped", "zero_padded", "pixel_shuffled", "grouped_queries", "recurrent"),
    *("mha", "encoder", "window", "both_ways_lstm", "cells", "multiplier", "inception", "unet"),
    *("transposed_groups", "group_norm", "group_norm_of_one", "space_to_depth", "mixer", "pyramid"),
    *("glu", "split_by_sizes", "indexed", "film", "experts", "maxout", "hyper"),
    *("res2net", "ghost", "rotary", "state_space", "unfolded", "graph"),
    *("nano_gpt", "shuffle_net_v2"),
)
"""Where channels are coupled in groups, in order or in multiples: odd numbers of them stay."""
CUT_UNEVENLY_IN_CI = (
    "shuffled",
    "grouped_queries",
    "cells",
    "glu",
    "experts",
)
EXPORTED = (
    *("separable", "shuffled", "pixel_shuffled", "grouped_queries", "fused", "mha_cross"),
    *("encoder_norm_first", "decoder", "batched_heads", "einsum", "both_ways_lstm"),
    *("inverted_residual", "inception", "unet", "transposed_groups", "group_norm", "volume"),
    *("space_to_depth", "mixer", "glu", "film", "experts", "split_by_sizes", "shared_embedding"),
    *("res2net", "ghost", "rotary", "modulated", "unfolded"),
    *("nano_gpt", "shared_keys", "shuffle_net_v2"),
)
"""Where numbers of heads, groups or channels are written into what is exported."""
EXPORTED_IN_CI = ("shuffled", "grouped_queries", "fused", "both_ways_lstm", "group_norm", "experts")
COVERED_BY_OTHERS = (
    *("flattened", "dense", "reused", "transformer", "by_hand", "hidden_width", "multi_head"),
    *("outer", "mha_no_bias", "mha_cross_weights", "encoder", "whole_transformer"),
    *("both_ways_gru", "given_state", "learned_state", "lstm_by_hand", "recurrent", "signal"),
    *("selective_kernel", "softmax_over_channels", "convnext", "vit", "written_view", "kept_view"),
    *("pyramid", "stretched", "several_ways", "frozen", "cross_stage", "efficient_gate"),
)
"""Pruning each by half takes only branches of `compress`, and its model only operators, that the
others do: measured by branch coverage and torch's dispatch. `make soak` tries them too."""
VARIANTS = ("mha_sequence_first", "mha_seen_weights", "rotary_shared", "shared_configuration")
"""Attention as in mha, rotary and shared_keys, written in another way; `make soak` tries it too."""
WHOLE_NETS = ("shuffle_net_v2", "nano_gpt", "decoder", "encoder_nested", "encoder_norm_first")
"""Deeper nets of parts that others are made of; `make soak` tries them too."""
IN_SOAK = {*COVERED_BY_OTHERS, *VARIANTS, *WHOLE_NETS}
IN_CI = {name: case for name, case in CASES.items() if name not in IN_SOAK}


def soaked(names: Iterable[str], *ratio: float, in_ci: Iterable[str]) -> list:
    """Return the parameters of a test, of which only `make soak` tries those that CI does not."""
    return [pytest.param(n, *ratio, marks=[pytest.mark.soak] * (n not in in_ci)) for n in names]


pytestmark = [
    pytest.mark.slow,
    # What torch says of its own layers, not of ours.
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning"),
]


@pytest.fixture(scope="module")
def pruned(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Case, float], tuple[EagerModel, EagerModel]]:
    """Return a function that gives a case's model and its pruned version, made once."""
    root = tmp_path_factory.mktemp("zoo")

    def get(case: Case, ratio: float) -> tuple[EagerModel, EagerModel]:
        before, after = root / case.name / "source", root / case.name / f"{ratio:g}"
        if not before.exists():
            module = case.build()
            outputs = run_in_eval(module, case.inputs(2))
            signature = name_outputs(case.signature, len(outputs))
            state = module.state_dict()
            EagerModel.create(before, case.recipe, state, signature, folder=case.folder)
        source = EagerModel.from_directory(before)
        if not after.exists():
            stage = PruneChannels(ratio=ratio, round_to=ROUND_TO[ratio])
            stage(source, Context(root=after))
        return source, EagerModel.from_directory(after)

    return get


def masked_twin(source: EagerModel, slim: EagerModel) -> nn.Module:
    """Return the source with zeros where the pruned model has nothing."""
    *rewriting, cut = slim.recipe.edits
    module = source.load().double()
    for edit in rewriting:
        edit.apply_(module)
    for name, axes in cut.kept.items():
        owner, _, short = name.rpartition(".")
        tensor = getattr(module.get_submodule(owner), short)
        for axis, kept in axes.items():
            silent = [i for i in range(tensor.shape[axis]) if i not in kept]
            with torch.no_grad():
                tensor.movedim(axis, 0)[silent] = 0
    return module


def doubles(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x.double() if x.is_floating_point() else x for x in inputs)


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        *soaked(CASES, 0.5, in_ci=IN_CI),
        *soaked(CUT_UNEVENLY, 0.25, in_ci=CUT_UNEVENLY_IN_CI),
    ],
)
def test_a_pruned_model_is_smaller_and_equals_its_masked_twin(
    name: str, ratio: float, pruned
) -> None:
    case = CASES[name]
    try:
        source, slim = pruned(case, ratio)
    except StageFailed as error:
        assert case.stays and case.stays in str(error)
        return
    assert not case.stays, "it was expected to stay as it is"
    if ratio == 0.5:
        assert slim.macs() <= 0.85 * source.macs()
    expected, found = masked_twin(source, slim), slim.load().double()
    torch.manual_seed(7)
    for batch in (1, 5):
        inputs = doubles(case.inputs(batch))
        torch.testing.assert_close(
            run_in_eval(found, inputs), run_in_eval(expected, inputs), rtol=1e-7, atol=1e-7
        )


@pytest.mark.parametrize("name", soaked(CASES, in_ci=IN_CI))
def test_a_rewritten_model_answers_as_before(name: str, pruned) -> None:
    case = CASES[name]
    if case.stays:
        return
    source, slim = pruned(case, 0.5)
    module, rewritten = source.load().double(), source.load().double()
    for edit in slim.recipe.edits[:-1]:
        edit.apply_(rewritten)
    inputs = doubles(case.inputs(3))
    torch.testing.assert_close(
        run_in_eval(rewritten, inputs), run_in_eval(module, inputs), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("name", soaked(EXPORTED, in_ci=EXPORTED_IN_CI))
def test_a_pruned_model_is_exported(name: str, pruned, tmp_path: Path) -> None:
    """ExportOnnx compares with its source at several batch sizes, and fails where they differ."""
    source, slim = pruned(CASES[name], 0.5)
    exported = ExportOnnx()(slim, Context(root=tmp_path / "onnx"))
    assert exported.parameters() < source.parameters()


LOADING = """
import json, sys, torch
sys.path.insert(0, {folder!r})
torch.set_num_threads(1)
from compress.artifacts.eager_model import EagerModel
from compress.common.forward import run_in_eval
for path in {paths!r}:
    model = EagerModel.from_directory(path)
    outputs = run_in_eval(model.load(), model.signature.example(seed=7))
    print(json.dumps([x.double().tolist() for x in outputs]))
"""


def test_a_fresh_process_answers_bit_identically(pruned, fresh_torch: Callable[[str], str]) -> None:
    models = [pruned(case, 0.5)[1] for case in IN_CI.values() if not case.stays]
    paths = [str(model.path) for model in models]
    found = fresh_torch(LOADING.format(folder=str(Path.cwd()), paths=paths)).splitlines()
    for model, line in zip(models, found, strict=True):
        outputs = run_in_eval(model.load(), model.signature.example(seed=7))
        assert json.loads(line) == [x.double().tolist() for x in outputs], model.path
