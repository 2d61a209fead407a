"""docs/museum.md, from the exhibits and from what was found when they were planted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.museum import exhibits
from tests.museum.shown import PARTS, STEPS, Mark, StoredCurves, mark, mark_of

Record = Mapping[str, Any]
_EXAMPLE = Path(exhibits.__file__).with_name("norm_of_first_tp_rank.py")

_HEAD = """# The museum of silent bugs

Published bugs that trained on without a word, and the classic ones of the field, each planted in
this project's own code, one at a time, under the check that `verify` runs on a user's config:

    python -m tests.museum   # each in the first of the museum's configs that can hold it
    python -m tests.museum --config llama-8b.json --bf16.enabled false

A line says what saw it and how large it was; the exit code is 1 if one is missed. `--json` gives
`{"passed", "exhibits": [{"name", "seen", "by", "relative_size", "seconds", "curve_shows"}]}`.

"""
_HOW = """
## What a loss curve shows

The last column is what 100 steps of training with the bug show in their loss: a small model of the
same config learns Python's own text, and is evaluated halfway; bugs of a resume begin halfway, from
what a right run saved. Who looks at a curve has no right run of the same seed beside it, but has
seen others. So a curve **shows** a bug if it has no number somewhere, or if a tenth of it (the mean
of ten steps) lies outside the lowest and highest of five right runs of other seeds (other first
weights, another order of samples) by more than the distance between these two; then the tenth that
is farthest out is given, its loss in nats, and the right runs' range. A right run of the exhibits'
own seed shows nothing in any config; ALARMS if each is held against the others.

Meshes have two ranks of an axis where that is enough, ZeRO is 0 or 1, and 100 steps say nothing of
10,000. Measured once and stored (`tests/museum/curves.json`): `python -m tests.museum` repeats
the marks, and trains three steps.

## How the table is made

    python -m tests.museum.measure measure docs/museum.json
    python -m tests.museum.measure curves docs/museum.json
    python -m tests.museum.measure page docs/museum.json > docs/museum.md

## What it costs

For `configs/ds.json` on the default eight meshes `verify` takes 83 s of CPU time (87.6 and 77.8),
and took 70 s (68.9 and 71.8) before it had learned what the museum taught it: evaluation, masks,
a resume, the order of samples. Both in turns on two cores shared with other work.

## Adding an exhibit

One file in `tests/museum/exhibits/`; the file's name is the exhibit's, and the first paragraph of
its docstring is the table's sentence. Cite what you looked up; a mistake without a report has
neither date nor source; `needs` are names of `museum/needs.py`. For instance:

```python
EXAMPLE```

`plant()` is entered in every rank's process and nowhere else; nothing outside the museum knows of
it. An exhibit that is missed means that `verify` has to learn something, not that the exhibit has
to change.

"""
_CANNOT = """## What the check cannot see

- **What happens only at size.** The model is small: a bug that needs a sequence, a bucket or a
  group larger than a toy's (an integer that overflows, a bucket that is never full) is not in it.
- **What only a device does.** Kernels, streams, and a collective that is not waited for: verify
  runs on the CPU, where gloo's collectives hold up the host. `read_before_it_arrived` is that
  mistake with its effect written down; what NCCL forbids and gloo forgives is the strict
  backend's ([architecture.md](architecture.md)).
- **Unequal numbers of trained tokens.** Every sample predicts as many tokens as any other here: a
  loss averaged over microbatches of unequal counts (huggingface/transformers#35203,
  pytorch/torchtitan#2206) cannot be planted.
- **An overflow of one stage alone** (deepspeedai/DeepSpeed#994): no gradient overflows in the
  small run.
- **What half precision hides.** In bf16 and fp16 the bounds are those of the type (0.2 and 0.1),
  so an exhibit that does not need half precision is shown in fp32, and a user's config is best
  verified there, too.
- **A mistake that the reference shares**: the order of samples, the learning rate's schedule and
  what a document is are the library's own functions on both sides, in a process without the
  exhibit.
"""


def page(measured: Record, curves: StoredCurves) -> str:
    """The page docs/museum.md: of what machine, each exhibit's record, and stored loss curves."""
    records = list(measured["exhibits"].values())
    seen = [r for r in records if r["seen"]]
    published = [r for r in records if exhibits.load(r["name"]).EXHIBIT.source]
    quick = sum(r["seconds"] <= 10 for r in seen)
    marks = {r["name"]: mark(r["name"], curves) for r in records}
    shown = sum(of is not None and of.shows for of in marks.values())
    text = (
        f"**verify sees {len(seen)} of {len(records)}**, {quick} of them within 10 s each "
        f"({measured['machine']}).\n**A training-loss curve of 100 steps shows {shown} of "
        f"{len(records)}.** {len(published)} are published, with repository and number;\n"
        f"{len(records) - len(published)} are classics.\n\n"
        "| exhibit | date | source | what was wrong | config, mesh | seen by | size | s "
        "| loss curve |\n|---|---|---|---|---|---|---|---|---|\n"
    )
    for record in sorted(records, key=lambda r: r["name"]):
        text += _line(record, marks[record["name"]])
    how = _HOW.replace("ALARMS", _alarms(curves)).replace("EXAMPLE", _EXAMPLE.read_text())
    return _HEAD + text + how + _CANNOT


def _alarms(curves: StoredCurves) -> str:
    """How often the rule takes a right run for a wrong one."""
    beyond = [
        mark_of(tuple(one), [other for other in right if other is not one]).shows
        for right in curves["right"].values()
        for one in right
    ]
    return f"of all {len(beyond)} right runs {sum(beyond)} would"


def _line(record: Record, mark: Mark | None) -> str:
    exhibit = exhibits.load(record["name"]).EXHIBIT
    cells = [
        f"`{record['name']}`",
        exhibit.date,
        exhibit.source or "classic",
        exhibit.what.replace("|", "\\|"),
        f"{record['hall']}, {'x'.join(map(str, exhibit.mesh))}",
        record["by"] if record["seen"] else "**missed**",
        f"{record['relative_size']:.0e}".replace("e-0", "e-").replace("e+0", "e"),
        f"{record['seconds']:.1f}",
        _said(mark),
    ]
    return "| " + " | ".join(cells) + " |\n"


def _said(mark: Mark | None) -> str:
    if mark is None or not mark.shows:
        return "-" if mark is None else "nothing"
    loss, length = "no number" if mark.loss is None else f"{mark.loss:.2f}", STEPS // PARTS
    steps = f"steps {mark.tenth * length + 1} to {(mark.tenth + 1) * length}"
    return f"**shown**: {loss} in {steps}, right {mark.low:.2f} to {mark.high:.2f}"
