"""docs/museum.md, from the exhibits and from what was found when they were planted."""

from collections.abc import Mapping
from typing import Any

from parallel3d.verify.museum import exhibits

Record = Mapping[str, Any]

_HEAD = """# The museum of silent bugs

Published bugs that trained on without a word, and the classic ones of the field, each planted in
this project's own code, one at a time, under the check that `verify` runs on a user's config:

    python launch/verify.py --museum   # each in the first of the museum's configs that can hold it
    python launch/verify.py --museum --config llama-8b.json --bf16.enabled false

A line says what saw it and how large it was; the exit code is 1 if one is missed. `--json` gives
`{"passed", "exhibits": [{"name", "seen", "by", "relative_size", "seconds"}]}`.

"""
_HOW = """
## How the table is made

    python -m parallel3d.verify.museum measure docs/museum.json
    python -m parallel3d.verify.museum page docs/museum.json > docs/museum.md

## Adding an exhibit

One file in `parallel3d/verify/museum/exhibits/`; the file's name is the exhibit's. Cite what you
looked up; a mistake without a report has the source "". For instance:

```python
from parallel3d.engine.quirks import core
from parallel3d.verify.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(
    date="2024-04-15",
    source="deepspeedai/DeepSpeed#5411",
    what="Parameters cut by tensor parallelism were taken for replicated ones.",
    mesh=(1, 1, 4),  # the smallest of verify's meshes that has the axis
    needs=(),  # names in museum/needs.py: "clipping", "tied", ...
)


def plant() -> Planted:
    return replaced(core, "count_once", lambda held: None)
```

`plant` is entered in every rank's process and nowhere else; nothing outside the museum knows of
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


def page(measured: Record) -> str:
    """The page docs/museum.md: of what machine, and a record of each exhibit."""
    records = list(measured["exhibits"].values())
    seen = [r for r in records if r["seen"]]
    published = [r for r in records if exhibits.load(r["name"]).EXHIBIT.source]
    quick = sum(r["seconds"] <= 10 for r in seen)
    by_types = sum(r["by"] == "types" for r in seen)
    text = (
        f"**verify sees {len(seen)} of {len(records)}**, {quick} of them within 10 s each "
        f"({measured['machine']}).\nTypes see {by_types} of them, before a process is started. "
        f"{len(published)} are published, with repository and number;\n"
        f"{len(records) - len(published)} are classics.\n\n"
        "| exhibit | date | source | what was wrong | config, mesh | seen by | size | s |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    for record in sorted(records, key=lambda r: r["name"]):
        text += _line(record)
    return _HEAD + text + _HOW + _CANNOT


def _line(record: Record) -> str:
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
    ]
    return "| " + " | ".join(cells) + " |\n"
