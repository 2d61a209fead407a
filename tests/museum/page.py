"""Write docs/museum.md from the exhibits and their measured records."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.museum import exhibits
from tests.museum.exhibit import KINDS
from tests.museum.shown import PARTS, STEPS, Mark, StoredCurves, mark, mark_of

Record = Mapping[str, Any]
_EXAMPLE = Path(exhibits.__file__).with_name("norm_of_first_tp_rank.py")

_HEAD = """# The museum of silent bugs

Check that `verify` finds bugs that train on without an error. Published silent bugs and classic
mistakes are planted in this project's code, one at a time, while the check behind `verify` runs:

    python -m tests.museum   # each in the first of the museum's configs that can hold it
    python -m tests.museum --config llama-8b.json --bf16.enabled false

Each line names the comparison that saw the bug and its size; the last lines are the score by kind.
The exit code is 1 if one is missed. A bug is in every process, so the reference has it wherever it
calls the library. `--json` prints `{"passed", "kinds": {kind: {"seen", "total"}}, "exhibits"}`,
with `{"name", "seen", "by", "relative_size", "seconds", "curve_shows"}` for each exhibit.

`pytest tests/museum` plants one exhibit for each comparison, the one that it saw in the shortest
time, and in a resumed run only if no unbroken one shows it any; `pytest -m slow tests/museum`
plants the others and looks for false alarms.

"""
_HOW = """
## What a loss curve shows

The last column shows whether 100 steps of training with the bug would look wrong. A small model of
the same config learns the text of Python's library and is evaluated halfway; a bug of resuming
starts halfway, from the checkpoint of a right run. A curve **shows** the bug if it has a NaN, or if
a tenth of it (the mean of ten steps) lies outside five right runs with other seeds by more than
their own range. The table then has the tenth that is farthest out, its loss in nats, and the right
runs' range. Held against the others, ALARMS be flagged.

Meshes have at most two ranks of an axis where that is enough, and ZeRO is 0 or 1. The curves are
measured once and stored in `tests/museum/curves.json`; `python -m tests.museum` trains three steps.

## How the table is made

    python -m tests.museum.measure measure docs/museum.json
    python -m tests.museum.measure curves docs/museum.json
    python -m tests.museum.measure page docs/museum.json > docs/museum.md

## Adding an exhibit

Write one file in `tests/museum/exhibits/`. Its name is the exhibit's, and the first paragraph of
its docstring is the sentence in the table. Cite a report if there is one; otherwise leave date and
source empty. `needs` are names from `tests/museum/needs.py`, `kind` is one of the table's. For
example:

```python
EXAMPLE```

`plant()` is entered in each process that trains, the reference's too; with the need `save` only in
the run that saves. It raises TypeError if a patch does not take what the patched function takes. If
an exhibit is missed, improve `verify`, not the exhibit.

"""
_CANNOT = """## What the check cannot see

- **Effects of size.** Thresholds are lowered so that buckets fill and the loss is made in
  parts, and one step has 320 tokens and ids above 65,535. Larger sizes are not run.
- **Effects of a device.** Kernels, streams, and collectives that are not waited for: gloo's
  collectives block the host. `read_before_it_arrived` plants the effect of such a mistake; the
  strict backend checks NCCL's rules ([architecture.md](architecture.md)).
- **Unequal numbers of trained tokens**, unless the config weighs labels: otherwise all samples
  predict equally many tokens (huggingface/transformers#35203, pytorch/torchtitan#2206).
- **An overflow of one stage alone** (deepspeedai/DeepSpeed#994): no gradient overflows.
- **Small errors in half precision.** There the bound is four times the largest distance of right
  runs that add in other orders, also in parts that are rounded, as tensor-parallel ranks do.
  `verify` runs a config of half precision in fp32, too, where the other exhibits are planted.
- **Steps that are left out, and batches that change their size.** They have tests of their own, as
  have reading of files, import and export; `verify` lists them at its end.
"""


def page(measured: Record, curves: StoredCurves) -> str:
    """Return the page docs/museum.md from the measured records and the stored loss curves."""
    records = list(measured["exhibits"].values())
    seen = [r for r in records if r["seen"]]
    published = [r for r in records if exhibits.load(r["name"]).EXHIBIT.source]
    quick = sum(r["seconds"] <= 10 for r in seen)
    marks = {r["name"]: mark(r["name"], curves) for r in records}
    shown = sum(of is not None and of.shows for of in marks.values())
    measured_curves = sum(of is not None for of in marks.values())
    text = (
        f"**verify sees {len(seen)} of {len(records)} bugs**, {quick} within 10 s each "
        f"({measured['machine']}).\n**A training-loss curve of 100 steps shows {shown} of "
        f"the {measured_curves} for which it was drawn.** {len(published)} are published, with "
        f"repository\nand number; the others are classics or made up.\n\n"
    )
    text += "| kind | seen | of |\n|---|---|---|\n"
    for kind, words in KINDS.items():
        own = [r for r in records if exhibits.load(r["name"]).EXHIBIT.kind == kind]
        text += f"| {kind}: {words} | {sum(r['seen'] for r in own)} | {len(own)} |\n"
    text += (
        "\n| exhibit | kind | date | source | what was wrong | config, mesh | seen by | size | s "
        "| loss curve |\n|---|---|---|---|---|---|---|---|---|---|\n"
    )
    for record in sorted(records, key=lambda r: r["name"]):
        text += _line(record, marks[record["name"]])
    how = _HOW.replace("ALARMS", _alarms(curves)).replace("EXAMPLE", _EXAMPLE.read_text())
    return _HEAD + text + how + _CANNOT


def _alarms(curves: StoredCurves) -> str:
    """Return how many right runs the rule would flag."""
    beyond = [
        mark_of(tuple(one), [other for other in right if other is not one]).shows
        for right in curves["right"].values()
        for one in right
    ]
    return f"{sum(beyond)} of {len(beyond)} right runs would"


def _line(record: Record, mark: Mark | None) -> str:
    exhibit = exhibits.load(record["name"]).EXHIBIT
    cells = [
        f"`{record['name']}`",
        exhibit.kind,
        exhibit.date,
        exhibit.source or "classic",
        exhibit.what.replace("|", "\\|"),
        f"{record['hall']}, {exhibit.sizes}",
        record["by"] if record["seen"] else "**missed**",
        f"{record['relative_size']:.0e}".replace("e-0", "e-").replace("e+0", "e"),
        f"{record['seconds']:.1f}",
        _verdict(mark),
    ]
    return "| " + " | ".join(cells) + " |\n"


def _verdict(mark: Mark | None) -> str:
    if mark is None or not mark.shows:
        return "-" if mark is None else "nothing"
    loss = "no number" if mark.loss is None else f"{mark.loss:.2f}"
    length = STEPS // PARTS
    steps = f"steps {mark.tenth * length + 1} to {(mark.tenth + 1) * length}"
    return f"**shown**: {loss} in {steps}, right {mark.low:.2f} to {mark.high:.2f}"
