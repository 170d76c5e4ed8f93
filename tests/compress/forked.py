"""Several ranks on this machine, forked from one process that has imported what they need.

As torchrun would start them, but torch, which takes most of a short script's time, is imported
once, and not by each rank and by torchrun as well.
"""

import gc
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
BYTES_OF_A_PORT = 8


def launch(script: Path, ranks: int, *arguments: object) -> None:
    """Run a script as so many ranks, and return when all of them have ended well."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(ranks), script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def main(ranks: int, script: str) -> int:
    """Return 0 when all ranks have ended well, and 1 at once when one has not."""
    gc.disable()
    import torch._dynamo  # noqa: F401 - or the first optimizer of each would import it
    from torch.distributed import TCPStore

    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script)  # for what it imports
    if any("torchmetrics." in argument for argument in sys.argv):
        import torchmetrics  # noqa: F401
    gc.freeze()
    gc.enable()
    read, write = os.pipe()
    running = {_forked(rank, ranks, script, read) for rank in range(ranks)}
    # It is no rank's, so none can end it too early; and it has threads, so it follows the forks.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(write, str(store.port).encode().ljust(BYTES_OF_A_PORT) * ranks)
    while running:
        child, status = os.wait()
        running.remove(child)
        if status:
            for other in running:
                os.kill(other, 9)
            return 1
    return 0


def _forked(rank: int, ranks: int, script: str, ports: int) -> int:
    """Return the process of a rank, which begins when it has read where to meet the others."""
    child = os.fork()
    if child:
        return child
    port = os.read(ports, BYTES_OF_A_PORT).decode().strip()
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"},
        **{"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"},
    }
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:  # noqa: BLE001 - also a script that exits
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # gloo's threads may abort a process that takes itself apart


if __name__ == "__main__":
    del sys.argv[0]
    os._exit(main(int(sys.argv.pop(0)), sys.argv[0]))
