"""docs/parity.md: the largest differences of all that the full run of test_parity.py measured."""

import platform
from importlib.metadata import version

HEAD = """# Parity

Every mesh trains to the same numbers as one process: with the same seed and data, loss, gradient
norm and weights equal those of plain transformers (`GPT2LMHeadModel`, `LlamaForCausalLM`,
`Qwen2ForCausalLM`, `Qwen3ForCausalLM`) with torch's AdamW in fp64, clipping on.
To check your own config, run `parallel3d verify --config ds.json`. To measure the tables again:

    pytest -m slow tests/verify/test_parity.py --parity-table docs/parity.md

A cell is the worst of its cases over three steps: **relative difference of the loss / relative
difference of the gradient norm / largest absolute difference of a weight**. The bound is 1e-5.

"""

LONG_RUN = "\n## A long run"


def markdown(measured, seconds):
    """`measured`: a list of (row of settings, errors)."""
    worst = "{:.1e} / {:.1e} / {:.1e}".format(*_worst(errors for _, errors in measured))
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers")
    )
    meshes = list(dict.fromkeys(row["mesh"] for row, _ in measured))
    text = HEAD + (
        f"{len(measured)} cases in {seconds / 60:.0f} minutes on two cores ({packages}, "
        f"{platform.machine()}, gloo); the worst of all: {worst}.\n"
        "In each table the other settings are drawn by lot: with offload the schedule,\n"
        "microbatches (1, 3, 4), reduction (per_step, per_microbatch), activation checkpointing\n"
        "(none, selective, full), sequence parallelism, isolation of documents, and the family's\n"
        "models (tied and untied; for llama also Qwen2's biases and Qwen3's norms; two key/value\n"
        "heads on tp 4).\n"
    )
    for family in ("gpt", "llama"):
        mine = [
            (row, e) for row, e in measured if (row["model"].startswith("gpt")) == (family == "gpt")
        ]
        text += f"\n## {family}: ZeRO stage and offload (optimizer + parameters)\n\n"
        kinds = list(dict.fromkeys((row["zero"], row["offload"]) for row, _ in mine))
        heads = [f"ZeRO-{z}" + ("" if o == "none" else f", {o}") for z, o in kinds]
        text += _table(mine, meshes, kinds, heads, lambda row: (row["zero"], row["offload"]))
        text += f"\n## {family}: schedules\n\n"
        names = list(dict.fromkeys(row["schedule"] for row, _ in mine))
        text += _table(mine, meshes, names, names, lambda row: row["schedule"])
    for name in (
        "reduction",
        "checkpointing",
        "sequence_parallel",
        "isolate",
        "microbatches",
        "model",
    ):
        text += f"\n## {name}\n\n"
        values = list(dict.fromkeys(row[name] for row, _ in measured))
        text += _table(measured, meshes, values, list(map(str, values)), lambda row, n=name: row[n])
    return text


def by_hand(page):
    """Return the part of the page that is written by hand: the long run."""
    return "".join(page.partition(LONG_RUN)[1:])


def _table(measured, meshes, columns, heads, column_of):
    lines = ["| mesh pp×dp×tp | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for mesh in meshes:
        cells = []
        for column in columns:
            found = [e for row, e in measured if row["mesh"] == mesh and column_of(row) == column]
            numbers = (f"{x:.0e}".replace("e-0", "e-") for x in _worst(found))
            cells.append(" / ".join(numbers) if found else "–")
        lines.append(f"| {'×'.join(map(str, mesh))} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _worst(errors):
    errors = list(errors)
    return [max(getattr(e, name) for e in errors) for name in ("loss", "grad_norm", "weight")]
