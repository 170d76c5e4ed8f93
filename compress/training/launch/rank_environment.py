"""The ranks that one process starts, and what each finds in its environment; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

LOGS = "logs"  # folder, beside a training's state, of what its ranks print


@dataclass(frozen=True, kw_only=True)
class LocalRanks:
    """The ranks that one process starts: consecutive ones of one machine."""

    first: int = 0
    """Global rank of the first of them."""
    count: int
    world_size: int
    """Ranks on all machines."""
    local_first: int = 0
    """Rank of the first of them among those of its machine."""
    local_world_size: int
    """Ranks on this machine."""
    host: str
    """Where the key-value store through which the ranks meet is served."""
    port: int
    attempt: str
    """Prefix of all keys of this attempt at a training."""

    def environment(self, index: int) -> dict[str, str]:
        """Return what torchrun sets for a rank, which data factories and libraries read."""
        rank = self.first + index
        numbers = {
            "RANK": rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_first + index,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": rank // self.local_world_size,
        }
        server = {"MASTER_ADDR": self.host, "MASTER_PORT": str(self.port)}
        return server | {name: str(number) for name, number in numbers.items()}
