"""The faults of the soak: how each is planted, and what the run's journal must say of it."""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.soak.plant import (
    BATCH,
    SAVE,
    UPDATE,
    both_lost,
    clock_jump,
    collective_of_one,
    corpus_flipped,
    cut_off,
    delayed,
    failing_disk,
    files_gone,
    flip_in,
    folder_gone,
    full_metrics,
    half_written,
    host_lost,
    killed,
    late,
    memory_gone,
    message_added,
    message_dropped,
    message_lost,
    message_repeated,
    messages_swapped,
    missing,
    other_config,
    paused,
    raising,
    sentry_lost,
    stopped,
    truncated,
    unreadable,
    weight_flipped,
    weight_stale,
)

# Pipeline x data x tensor and the ZeRO stage of a start. Of three replicas the wrong one is known.
LAYOUTS = [((2, 1, 1), 1), ((1, 2, 1), 3), ((1, 1, 2), 3), ((1, 3, 1), 1), ((2, 2, 1), 3)]
REPLICAS = [((1, 3, 1), 1)]
PIPELINES = [((2, 1, 1), 1), ((2, 2, 1), 3)]
DAMAGED = "damaged"
DIES = "dies"
GOES_ON = "goes on"


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    `plant(rank, victim, step, at)` is called in each rank's process before its command; a fault
    that is DAMAGED instead calls `damage(folder, draw)` on the newest checkpoint, or on the corpus,
    after a launch. `located` must match a line of the journal; {victim} is the rank, {file} what
    `damage` returned. A fault that costs nothing and hides from the run has none.
    """

    kind: str
    name: str
    effect: str
    plant: Callable[..., None] | None = None
    damage: Callable[..., str] | None = None
    located: str = ""
    layouts: tuple = tuple(LAYOUTS)
    points: tuple[str, ...] = (BATCH, UPDATE)
    changes: tuple = ()
    victims: tuple[int, ...] = ()
    launcher: bool = False


IMPATIENT = (("parallel3d.train.timeout_seconds", 4),)
NOT_SAVED = r'"not_saved".*rank {victim}'
BLAMED = r'"fault".*rank {victim} on '
REJECTED = r'"launch".*is rejected: .*{file}'


def refused_by_disk(kind, name, code, call):
    """A save whose `call` fails with an error of the operating system."""
    located = f"{NOT_SAVED}.*{os.strerror(code)}"
    return Fault(
        kind, name, GOES_ON, partial(failing_disk, code, call), located=located, points=(SAVE,)
    )


def garbled(kind, name, plant, received, sent):
    """A message that arrives with the bits of another; the first of two stages sends it."""
    located = (
        rf'"wrong_bits".*after step {{step}} .*received other bits in {received} '
        rf"than rank {{victim}} on \S+ sent: those of {sent}"
    )
    layouts = tuple(PIPELINES)
    return Fault(
        kind, name, DIES, plant, located=located, layouts=layouts, points=(BATCH,), victims=(0,)
    )


FAULTS = [
    Fault(
        "process termination",
        "rank",
        DIES,
        killed,
        located=BLAMED + ".*died",
        points=(BATCH, UPDATE, SAVE),
    ),
    Fault("process termination", "rank and sentry", DIES, both_lost, located=BLAMED),
    # The arbiter takes a rank for dead whose sentry is gone: it cannot tell it from a lost host.
    Fault("process termination", "sentry", DIES, sentry_lost, located=BLAMED),
    Fault("process termination", "host", DIES, host_lost, located=r'"launch".*"unended": true'),
    Fault(
        "process termination",
        "launcher",
        GOES_ON,
        launcher=True,
        layouts=(((1, 2, 1), 3),),
        located=r'"end".*"stopped": true',
    ),
    Fault("hang", "SIGSTOP", DIES, stopped, located=BLAMED + ".*has been stopped"),
    Fault("delay", "sleep", GOES_ON, delayed),
    Fault("delay", "SIGSTOP and SIGCONT", GOES_ON, paused),
    Fault(
        "time-out",
        "late",
        DIES,
        late,
        located=r"rank {victim} on .*(is late|stood still)",
        changes=IMPATIENT,
        points=(UPDATE,),
    ),
    Fault(
        "exception",
        "ZeroDivisionError",
        DIES,
        raising,
        located=BLAMED + '.*ZeroDivisionError|"rank": {victim}.*ZeroDivisionError',
    ),
    Fault(
        "resource exhaustion",
        "memory",
        DIES,
        memory_gone,
        located=BLAMED + '.*MemoryError|"rank": {victim}.*MemoryError',
    ),
    Fault("resource exhaustion", "files", GOES_ON, files_gone, located=NOT_SAVED, points=(SAVE,)),
    refused_by_disk("resource exhaustion", "disk", errno.ENOSPC, "before_write"),
    refused_by_disk("resource unavailable", "read-only", errno.EROFS, "before_create"),
    Fault(
        "resource unavailable",
        "gone",
        GOES_ON,
        folder_gone,
        located='"not_saved".*checkpoints',
        points=(SAVE,),
        victims=(0,),
    ),
    Fault(
        "checkpoint corruption",
        "manifest or state",
        DAMAGED,
        damage=partial(flip_in, "*.json"),
        located=REJECTED,
    ),
    Fault(
        "payload corruption",
        "tensors",
        DAMAGED,
        damage=partial(flip_in, "shard-*"),
        located=REJECTED,
    ),
    Fault("checkpoint truncation", "", DAMAGED, damage=truncated, located=REJECTED),
    Fault("checkpoint missing", "", DAMAGED, damage=missing, located=REJECTED),
    Fault("checkpoint I/O error", "read", DAMAGED, damage=unreadable, located=REJECTED),
    refused_by_disk("checkpoint I/O error", "fsync", errno.EIO, "before_fsync"),
    Fault(
        "tensor corruption",
        "a replica's weight",
        DIES,
        weight_flipped,
        located='"wrong_bits".*: rank {victim} on',
        layouts=tuple(REPLICAS),
    ),
    Fault(
        "stale state",
        "a replica's weight",
        DIES,
        weight_stale,
        located='"wrong_bits".*: rank {victim} on',
        layouts=tuple(REPLICAS),
    ),
    Fault(
        "drop",
        "activation",
        DIES,
        message_dropped,
        located=r'"fault".*rank \d on .*is late: at .*RECV_[FB]\d of step {step}',  # the channel
        layouts=tuple(PIPELINES[:1]),
        victims=(0,),
        changes=IMPATIENT,
        points=(BATCH,),
    ),
    Fault(
        "message drop",
        "gradient",
        DIES,
        message_lost,
        # Either end may be the one that waits longest.
        located=r'"fault".*rank \d on .*is late: .*(RECV_B\d of step {step}, waiting for 0RECV_B0'
        r"|SEND_B\d of step {step}, waiting until its messages are sent)",
        layouts=tuple(PIPELINES[:1]),
        victims=(1,),
        changes=IMPATIENT,
        points=(BATCH,),
    ),
    garbled("duplicate", "in place of the next", message_repeated, "1RECV_F1", "1RECV_F0"),
    garbled("reorder", "two activations", messages_swapped, "1RECV_F0", "1RECV_F1"),
    Fault(
        "duplicate",
        "once more",
        DIES,
        message_added,
        located=r'"fault".*rank \d on .*is late: at .*(RECV|SEND)_[FB]\d of step {step}',
        layouts=tuple(PIPELINES[:1]),
        victims=(0,),
        changes=IMPATIENT,
        points=(BATCH,),
    ),
    Fault(
        "network partition",
        "a rank and its sentry",
        DIES,
        cut_off,
        located=r'"fault".*rank {victim} on \S+ has been silent',
    ),
    Fault(
        "collective desync",
        "all-reduce of one",
        DIES,
        collective_of_one,
        # It is late at the least, if the other does not come to a collective of the same group.
        located=r'"fault".*(rank {victim}(:| with) all_reduce \d+ of 3 float32'
        r"|rank {victim} on \S+ is late: at .*the optimizer's step {step})",
        layouts=tuple(LAYOUTS[:3]),  # sums of two have the same bits in either backend
        changes=IMPATIENT,
        points=(UPDATE,),
    ),
    Fault(
        "config drift",
        "learning rate",
        DIES,
        other_config,
        located=r'"(fault|refused)".*optimizer.params.lr.*rank {victim}',
    ),
    Fault("corpus shard flipped", "token", DAMAGED, damage=corpus_flipped, located=r"tokens.bin"),
    Fault("clock jump", "an hour on", GOES_ON, partial(clock_jump, 3600.0)),
    Fault("clock jump", "an hour back", GOES_ON, partial(clock_jump, -3600.0)),
    Fault("full disk", "metrics", GOES_ON, full_metrics, located='"metrics_not_written"'),
    Fault(
        "full disk",
        "digests",
        GOES_ON,
        partial(half_written, "digests.jsonl"),
        located='"digest_not_written"',
    ),
    Fault(
        "full disk",
        "events",
        GOES_ON,
        partial(half_written, "events.jsonl"),
        located=r'"launch".*"unended": true',  # the end of the launch before
    ),
]
OWN_KINDS = ("clock jump", "corpus shard flipped", "full disk")
KINDS = sorted({fault.kind for fault in FAULTS})
NAMED_KINDS = [kind for kind in KINDS if kind not in OWN_KINDS]
