"""Train on several processes of this machine, or of all that torchrun or srun has started."""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from compress.common.atomic_files import write_atomically
from compress.common.dependency_recorder import Recording, add_to_recordings
from compress.common.errors import StageFailed
from compress.training.launch.local_ranks import run_ranks
from compress.training.launch.rank_environment import LocalRanks
from compress.training.launch.rank_group import joined_group
from compress.training.launch.worker import JOB_FILE
from compress.training.launch.worker_errors import RankKilled

if TYPE_CHECKING:
    from collections.abc import Callable

    from compress.training.loop.job import Job
    from compress.training.loop.step_metrics import TrainingRecord

log = logging.getLogger(__name__)


def train_on_ranks(job: Job, on_record: Callable[[TrainingRecord], None]) -> None:
    """Train on several processes, and return when all of them have ended.

    ``on_record`` is called in this process after steps and epochs. A rank's error is raised here.
    """
    parallel = job.training.parallel
    group = joined_group()
    file = job.folder / JOB_FILE
    try:
        content = pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise StageFailed(
            f"the data cannot be sent to {parallel.ranks} processes ({error}); "
            "name it by a data factory, or set parallel.processes to 1"
        ) from error
    # In a file: through a pipe it would hang this process where a rank dies before it has read it.
    write_atomically(file, content)
    try:
        for restarts_left in reversed(range(parallel.restarts + 1)):
            try:
                # Several machines were started, or fit would have refused the settings.
                if group and (parallel.nodes > 1 or group.fits(parallel)):
                    recorded = group.train(job.folder, parallel, on_record)
                else:
                    # Port 0: the system chooses a free one.
                    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                    ranks = LocalRanks(
                        first=0,
                        count=parallel.ranks,
                        world_size=parallel.ranks,
                        local_first=0,
                        local_world_size=parallel.ranks,
                        host="127.0.0.1",
                        port=store.port,
                        attempt="training",
                    )
                    recorded = run_ranks(job.folder, ranks, store, on_record)
            except RankKilled as error:
                if not restarts_left:
                    raise
                log.warning("%s; all are started again from the last checkpoint", error)
            else:
                add_to_recordings(Recording.from_json(recorded))
                return
    finally:
        file.unlink(missing_ok=True)
