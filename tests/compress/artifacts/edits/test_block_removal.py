import inspect
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.edits.removal import alike_entries, blocks_of, keep_blocks_
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import KeepBlocks, KeepIndices, Recipe
from compress.common.forward import run_in_eval
from compress.common.signature import Signature, TensorSpec

NET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Net(nn.Module):
    def __init__(self, depth=4, width=8):
        super().__init__()
        self.depth, self.width = depth, width
        self.layers = nn.ModuleList(Block(width, i) for i in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        for i in range(self.depth):
            x = self.layers[i](x)
        return self.head(x)
"""


@pytest.fixture
def source(tmp_path: Path) -> EagerModel:
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "listed.py").write_text(NET)
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 8)),))
    recipe = Recipe(factory="listed:Net")
    return import_checkpoint(tmp_path / "source", recipe, signature, checkpoint=None, folder=folder)


def test_blocks_that_stay_are_numbered_anew_and_counted(source: EagerModel) -> None:
    module, whole = source.load(), source.load()
    keep_blocks_(module, {"layers": (0, 3)})
    assert blocks_of(whole) == {"layers": 4} and blocks_of(module) == {"layers": 2}
    assert module.depth == 2 and module.width == 8
    assert [block.layer_idx for block in module.layers] == [0, 1]
    assert "layers.1.up.weight" in module.state_dict() and len(module.state_dict()) == 10
    x = torch.randn(2, 8)
    expected = whole.head(whole.layers[3](whole.layers[0](x)))
    assert torch.equal(module(x), expected)


def test_a_fresh_process_answers_bit_identically(source, tmp_path, fresh_torch) -> None:
    edits = (
        KeepBlocks(kept={"layers": (0, 2)}),
        KeepIndices(kept={"layers.1.up.weight": {0: (1, 3)}, "layers.1.up.bias": {0: (1, 3)},
                          "layers.1.down.weight": {1: (1, 3)}}),
    )  # fmt: skip
    module = source.load()
    for edit in edits:
        edit.apply_(module)
    cut = source.derive(tmp_path / "cut", module, edits=edits)
    assert EagerModel.from_directory(cut.path).recipe.edits == edits
    found = fresh_torch(
        f"import sys; sys.path.insert(0, {str(Path.cwd())!r})\n"
        "from compress.artifacts.eager_model import EagerModel\n"
        "from compress.common.forward import run_in_eval\n"
        f"model = EagerModel.from_directory({str(cut.path)!r})\n"
        "print(run_in_eval(model.load(), model.signature.example(seed=7))[0].tolist())"
    )
    expected = run_in_eval(module, cut.signature.example(seed=7))[0]
    assert json.loads(found) == expected.tolist()
    assert cut.skeleton() is not None


def test_stages_of_residual_blocks_are_found_but_not_their_shortcuts() -> None:
    def block() -> nn.Module:
        return nn.ModuleDict({"conv": nn.Conv2d(4, 4, 1), "shortcut": nn.Sequential(nn.ReLU())})

    stages = [nn.Sequential(block(), block()), nn.Sequential(block(), block(), block())]
    net = nn.Sequential(nn.Conv2d(1, 4, 1), *stages, nn.ReLU())
    assert blocks_of(net) == {"": 4, "1": 2, "2": 3}
    assert list(alike_entries(net)) == [1, 2]
    keep_blocks_(net, {"": (0, 2, 3), "2": (0, 2)})
    assert blocks_of(net) == {"1": 2}


def test_named_entries_keep_their_names() -> None:
    net = nn.Sequential()
    for name in ("one", "two", "three"):
        net.add_module(name, nn.Sequential(nn.ReLU()))
    keep_blocks_(net, {"": (0, 2)})
    assert [name for name, _ in net.named_children()] == ["one", "three"]


@pytest.mark.parametrize("indices", [(), (0, 4), (2, 1), (1, 1), (-1, 0)])
def test_wrong_indices_are_refused(source: EagerModel, indices: tuple[int, ...]) -> None:
    module = source.load()
    with pytest.raises(IndexError, match=r"'layers' has 4 blocks, found .* 0 to 3, ascending"):
        keep_blocks_(module, {"layers": indices})
    assert len(module.layers) == 4


@pytest.mark.parametrize("name", ["head", "layer"])
def test_what_is_no_list_is_refused(source: EagerModel, name: str) -> None:
    with pytest.raises(KeyError, match="not a list of blocks; those there are: 'layers'"):
        keep_blocks_(source.load(), {name: (0,)})


def configured(kind: str, **arguments):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**arguments)
    return getattr(transformers, f"{kind}Model")(config).eval()


SMALL = {"vocab_size": 50, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}


@pytest.mark.slow  # importing transformers is what takes long
@pytest.mark.parametrize(
    ("kind", "container", "arguments"),
    [
        ("Bert", "encoder.layer", {**SMALL, "num_hidden_layers": 4}),
        ("Llama", "layers", {**SMALL, "num_hidden_layers": 4, "num_key_value_heads": 2}),
        ("Gemma2", "layers", {**SMALL, "num_hidden_layers": 4, "head_dim": 8,
                              "num_key_value_heads": 2}),
        ("GPT2", "h", {"vocab_size": 50, "n_embd": 16, "n_head": 2, "n_layer": 4}),
    ],
)  # fmt: skip
def test_transformers_run_and_keep_their_caches(kind, container, arguments) -> None:
    module = configured(kind, **arguments)
    layers = module.get_submodule(container)
    inner = [layers[1], layers[3]]
    keep_blocks_(module, {container: (1, 3)})
    assert list(layers) == inner
    assert module.config.num_hidden_layers == 2
    types = getattr(module.config, "layer_types", None)
    assert types is None or len(types) == 2
    ids = torch.arange(6).reshape(1, 6)
    whole = module(input_ids=ids).last_hidden_state
    if kind != "Bert":
        cache = module(input_ids=ids[:, :5], use_cache=True).past_key_values
        assert len(cache) == 2
        # transformers 5.24 renamed the argument, and warns where the old name is used.
        renamed = "cache" in inspect.signature(module.forward).parameters
        arguments = {"cache" if renamed else "past_key_values": cache}
        last = module(input_ids=ids[:, 5:], **arguments).last_hidden_state
        torch.testing.assert_close(last[:, 0], whole[:, 5], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_encoder_and_decoder_count_their_own() -> None:
    module = configured("T5", vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2)
    keep_blocks_(module, {"decoder.block": (0, 2)})
    assert module.decoder.config.num_layers == 2
    assert module.encoder.config.num_layers == 3
    ids = torch.arange(4).reshape(1, 4)
    module(input_ids=ids, decoder_input_ids=ids, use_cache=True)
