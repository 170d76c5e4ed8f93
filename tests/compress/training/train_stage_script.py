"""A program of its own that trains, so that a test can interrupt it: ROOT DATA EPOCHS PROCESSES."""

import sys
from pathlib import Path

from compress.artifacts.eager_model import EagerModel
from compress.core.context import Context
from compress.data.splits import DataReference
from compress.training.stage import Train

HERE = Path(__file__).parent


def tell(task: str, done: int, total: int, note: str = "") -> None:
    print(task, done, total, note, flush=True)


def main(root: Path, behaviour: str, epochs: int, processes: int) -> None:
    data = DataReference("nets:behaving", {"behaviour": behaviour}, HERE, 16).load()
    stage = Train(epochs=epochs, batch_size=16, parallel={"processes": processes})
    source = EagerModel.from_directory(root / "source")
    try:
        trained = stage(source, Context(root=root / "train", data=data, progress=tell))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
    print("digest", trained.digest, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
