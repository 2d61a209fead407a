"""Keep torch's record of a run's last collectives, to explain a fault afterwards."""

from contextlib import suppress
from pathlib import Path

from torch._C import _distributed_c10d as c10d

# NCCL's recorder, or that of all backends.
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def record_collectives(folder: Path, rank: int) -> None:
    """Write `rank-N.json`: the last collectives of each group, their sizes, and which are over.

    Ranks that differ in the last ones have caused the fault, or met it first. Call it before the
    process ends, and on a thread that may hang.
    """
    for name in _RECORDERS:
        dump = getattr(c10d, name, None)
        if dump is not None:
            # Nobody is left who could act on a full disk.
            with suppress(OSError, RuntimeError):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"rank-{rank}.json").write_bytes(dump())
            return
