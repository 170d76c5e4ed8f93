"""Models and data that tests of training share; their factories stand in nets.py."""

from pathlib import Path

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.data.loader_config import Loading
from compress.data.splits import DataReference, Splits

HERE = Path(__file__).parent


def import_net(
    path: Path, factory: str = "nets:classifier", rows: int | str = "batch", **arguments
) -> EagerModel:
    """Import a freshly initialized network with one input of four features."""
    signature = Signature(inputs=(TensorSpec(name="features", shape=(rows, 4)),))
    recipe = Recipe(factory=factory, arguments=arguments)
    return import_checkpoint(path, recipe, signature, checkpoint=None, folder=HERE)


def import_transformer(path: Path, factory: str = "transformer", **arguments) -> EagerModel:
    """Import a freshly initialized transformer over sequences of six tokens."""
    signature = Signature(inputs=(TensorSpec(name="tokens", shape=("batch", 6), dtype="int64"),))
    recipe = Recipe(factory=f"transformers_here:{factory}", arguments=arguments)
    return import_checkpoint(path, recipe, signature, checkpoint=None, folder=HERE)


def load_data(
    factory: str = "blobs", batch_size: int = 16, loading: Loading | None = None, **arguments
) -> Splits:
    return DataReference(
        f"nets:{factory}", arguments, HERE, batch_size, loading or Loading()
    ).load()
