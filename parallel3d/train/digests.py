"""The digests of a run's state, digests.jsonl, and the comparison of two runs (no torch).

A line has the digest of the training state after a step, a digest of each parameter, and a link of
a hash chain: two runs whose chains agree at a step agreed at all digests before.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from parallel3d.base.errors import DataError
from parallel3d.base.journal import record
from parallel3d.base.step_lines import METRICS, append_line, read_lines

DIGESTS = "digests.jsonl"
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
"""Relative difference of losses, norms and tensors that rounding on another mesh explains."""
_NAMED = 8  # parameters that are named


def _hash(text: str, size: int = 16) -> str:
    return blake2b(text.encode(), digest_size=size).hexdigest()


def digest_of(checksums: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the digest of a state and of each parameter, by the parameters' checksums."""
    parameters = {name: _hash(json.dumps(sums), 4) for name, sums in checksums.items()}
    return {"digest": _hash(json.dumps(checksums, sort_keys=True)), "parameters": parameters}


def append_digest(folder: Path, step: int, checksums: Mapping[str, Sequence[int]]) -> None:
    """Append the digest of the state after `step` to a run's digests; a full disk is an event."""
    digest = digest_of(checksums)
    try:
        last = list(_by_step(folder / DIGESTS).values())[-1:]
        chain = _hash("".join([*(line["chain"] for line in last), digest["digest"]]))
        append_line(folder / DIGESTS, json.dumps({"step": step, "chain": chain} | digest))
    except OSError as error:
        record("digest_not_written", step=step, reason=f"{error.strerror} ({folder / DIGESTS})")


def _by_step(path: Path) -> dict[int, dict[str, Any]]:
    """Return the complete lines of a file by their steps; {} if there is none."""
    if not path.exists():
        return {}
    return {int(line["step"]): line for line in read_lines(path)}


def compare_runs(one: Path, other: Path, bound: float = 0.0) -> dict[str, Any]:
    """Return where two runs differ, for `--json` of `parallel3d runs diff`.

    - `steps`, `digests`: numbers of steps and of digests that both have.
    - `first_step`, `values`: the first step whose loss or gradient norm differs, and both values;
      None and {} if there is none.
    - `first_digest`, `parameters`: the same for digests, and the parameters that differ there.
    - `same`: True if nothing differs.

    With a `bound` above 0, values may differ by this share, and digests are not compared. Raises
    DataError if a folder is not a run's, or the two have no step in common.
    """
    metrics = [_by_step(run / METRICS) for run in (one, other)]
    digests: list[dict[int, dict[str, Any]]] = [{}, {}]
    if not bound:
        digests = [_by_step(run / DIGESTS) for run in (one, other)]
    for run, lines in zip((one, other), metrics, strict=True):
        if not lines:
            raise DataError(f"{run}: has no {METRICS} with a step; use the folder of a run")
    steps = sorted(metrics[0].keys() & metrics[1].keys())
    if not steps:
        raise DataError(f"{one} and {other}: have no step in common; use two runs that overlap")

    def differing(step: int) -> dict[str, list[float | None]]:
        values = {}
        for key in ("loss", "grad_norm"):
            pair = [lines[step].get(key) for lines in metrics]
            if not is_close(pair[0], pair[1], bound):
                values[key] = pair
        return values

    shared = sorted(digests[0].keys() & digests[1].keys())
    step = next(filter(differing, steps), None)
    at = next((n for n in shared if digests[0][n]["digest"] != digests[1][n]["digest"]), None)
    names = [lines[at]["parameters"] for lines in digests] if at else [{}, {}]
    return {
        "same": step is None and at is None,
        "steps": len(steps),
        "first_step": step,
        "values": differing(step) if step else {},
        "digests": len(shared),
        "first_digest": at,
        "parameters": [n for n in names[0] if names[0][n] != names[1].get(n)],
    }


def is_close(one: object, other: object, bound: float) -> bool:
    """Return True if two numbers differ by `bound` times the larger one at most.

    A number that is not finite, or anything else, is close to the same alone.
    """
    if one == other:
        return True
    if not isinstance(one, int | float) or not isinstance(other, int | float):
        return False
    if math.isnan(one) and math.isnan(other):
        return True
    if not math.isfinite(one - other):
        return False
    return abs(one - other) <= bound * max(abs(one), abs(other))


def in_words(difference: Mapping[str, Any], rule: str = "in every bit") -> Iterator[str]:
    """Yield lines about the result of `compare_runs`; `rule` says how values must agree."""
    if difference["same"]:
        steps = difference["steps"]
        digests = difference["digests"]
        yield f"same: {steps:,} steps and {digests:,} digests agree {rule}"
    for key, (one, other) in difference["values"].items():
        yield f"step {difference['first_step']} is the first that differs: {key} {one} and {other}"
    names = difference["parameters"]
    if names:
        named = ", ".join(names[:_NAMED])
        more = ", ..." if len(names) > _NAMED else ""
        yield (
            f"the digest of step {difference['first_digest']} is the first that differs, in "
            f"{len(names):,} parameters: {named}{more}"
        )
