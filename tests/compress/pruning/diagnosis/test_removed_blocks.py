"""A block that a model cannot do without is named, before it is trained for."""

from pathlib import Path

import torch
from torch import nn

from compress import Context
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.core.diagnosis.cause import RefusedStage
from compress.core.metrics import Metric
from compress.data.splits import Splits
from compress.pruning.diagnosis.causes import CAUSES
from compress.pruning.diagnosis.diagnosis import RemovedBlocks
from compress.pruning.prune_layers import PruneLayers
from tests.compress.pruning.diagnosis.digit_nets import data, deep_net

HERE = Path(__file__).parent
IMAGES = Signature(inputs=(TensorSpec(name="x", shape=("batch", 1, 8, 8)),))


def test_a_needed_block_is_named_and_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = deep_net()
    x, y = data()["train"].tensors
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    recipe = Recipe(factory="digit_nets:deep_net")
    model = EagerModel.create(tmp_path / "m", recipe, module.state_dict(), IMAGES, folder=HERE)
    stage = PruneLayers(remove=2)
    context = Context(tmp_path / "made", Splits(data(), 64), metric=Metric("accuracy"))
    after = stage.run_checked(model, context)
    measured = RemovedBlocks(stage, model, after, context, 1.0)
    lost = 100 * (context.score(model) - context.score(after))
    assert lost > 5 and measured.search.lost > 5
    parts = tuple(measured.pruned_parts)
    refused = RefusedStage(stage, model, after, context, parts, measured, 1.0)
    causes = {cause.key: cause for cause in CAUSES}
    refit, needed = causes["no_refit"], causes["block_needed"]
    shares = [cause.recovered_share(refused, parts) for cause in (refit, needed)]
    # Blocks that are put back return all of it; the refit's share comes first.
    assert sum(share for share in shares if share and share > 0) > 0.95
    assert refit.measure(refused, "") is not None
    settings = [repair.settings for repair in needed.repairs(refused, parts)]
    assert {"exclude": [*parts]} in settings
    assert {"remove": 1, "keep": None, "ratio": None, "blocks": None} in settings
