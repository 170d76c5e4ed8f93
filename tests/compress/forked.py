"""Several ranks on this machine, forked from one process that has imported what they need.

As torchrun would start them, but what takes most of a short script's time, the import of torch and
of its parts for trainings, is done once for all ranks of a session.
"""

import os
import runpy
import signal
import sys
import tempfile
import traceback
from pathlib import Path

from tests.forking import Forks

ROOT = Path(__file__).parents[2]
BYTES_OF_A_PORT = 8
SECONDS = 280

IMPORTS = f"""
import os, sys, warnings
# Else each rank that compiles starts a process for it, which imports torch once more.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
warnings.simplefilter("ignore")
sys.path.insert(0, {str(ROOT)!r})
import torch, torch._dynamo
import torch.distributed.checkpoint.state_dict, torch.distributed.optim
import torch.distributed.pipelining, torch.distributed.tensor.parallel
import compress.training.loop.trainer
import compress.training.distributed.ddp, compress.training.distributed.fsdp
torch.set_num_threads(1)
# Else those that compile try six programs of AMX; older compilers know no products of 16 bits.
from torch._inductor.cpu_vec_isa import VecAMX, VecISA
VecISA.check_build = lambda _, code: code != VecAMX._amx_fp16_code
"""

LAUNCHER = """
import sys
sys.argv[1:] = {arguments!r}
from tests.compress.forked import run_ranks
run_ranks({ranks}, {script!r})
"""


class Launcher:
    """Runs scripts, each as several ranks."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks

    def __call__(self, script: Path, ranks: int, *arguments: object) -> None:
        """Run a script as so many ranks, and return when all of them have ended well."""
        words = [str(argument) for argument in arguments]
        code = LAUNCHER.format(arguments=words, ranks=ranks, script=str(script))
        with tempfile.TemporaryDirectory() as folder:
            self._forks.run(code, Path(folder))


def run_ranks(ranks: int, script: str) -> None:
    """Return when all ranks have ended well; raise at once when one has not."""
    signal.alarm(SECONDS)
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script)  # for what it imports
    if any("torchmetrics." in argument for argument in sys.argv):
        import torchmetrics  # noqa: F401
    read, write = os.pipe()
    running = {_forked(rank, ranks, script, read) for rank in range(ranks)}
    from torch.distributed import TCPStore

    # It is no rank's, so none can end it too early; and it has threads, so it follows the forks.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(write, str(store.port).encode().ljust(BYTES_OF_A_PORT) * ranks)
    while running:
        child, status = os.wait()
        running.remove(child)
        if status:
            for other in running:
                os.kill(other, 9)
            raise ChildProcessError(f"a rank ended with {os.waitstatus_to_exitcode(status)}")


def _forked(rank: int, ranks: int, script: str, ports: int) -> int:
    """Return the process of a rank, which begins when it has read where to meet the others."""
    child = os.fork()
    if child:
        return child
    signal.alarm(SECONDS)
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
