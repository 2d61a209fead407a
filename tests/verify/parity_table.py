"""docs/parity.md: the largest differences of all that the full run of test_parity.py measured."""

import platform
from importlib.metadata import version

HEAD = """# Parity

Every mesh trains to the same numbers as one process: with the same seed and data, loss, gradient
norm and weights equal those of plain transformers (`GPT2LMHeadModel`, `GPTNeoXForCausalLM`,
`LlamaForCausalLM`, `Qwen2ForCausalLM`, `Qwen3ForCausalLM`, `MixtralForCausalLM`) with
torch's AdamW in fp64, clipping on.
To check your own config, run `parallel3d verify --config ds.json`. A config of bf16 or fp16 is
compared with a run of its own precision, and on two of the meshes in fp32 as well, where rounding
hides no mistake. To measure the tables again:

    pytest -m slow tests/verify/test_parity.py --parity-table docs/parity.md

A cell is the worst of its cases over three steps: **relative difference of the loss / relative
difference of the gradient norm / largest absolute difference of a weight**. The bound is 1e-5.

"""

LONG_RUN = "\n## A long run"


SETTINGS = {
    "model": "model",
    "weights": "pipeline.weights (ZeRO-3)",
    "mup": "muP",
    "reduction": "pipeline.gradient_reduction",
    "checkpointing": "activation_checkpointing",
    "sequence_parallel": "sequence_parallel",
    "isolate": "isolate_documents",
    "microbatches": "microbatches",
}


def markdown(measured, seconds):
    """`measured`: a list of (row of settings, errors)."""
    worst = "{:.1e} / {:.1e} / {:.1e}".format(*_worst(errors for _, errors in measured))
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers")
    )
    meshes = sorted({row["mesh"] for row, _ in measured})
    minutes = f"{seconds / 60:.0f} minutes"
    text = HEAD + (
        f"A sample of {len(measured)} cases, each trained as `verify` does it; each two settings\n"
        f"that can go together meet in at least one. {minutes} on two shared cores, gloo:\n"
        f"{packages}, {platform.machine()}.\n"
        f"The worst: {worst}. A dash: not in the sample.\n"
    )
    text += "\n## ZeRO stage and offload (optimizer + parameters)\n\n"
    kinds = sorted({(row["zero"], row["offload"]) for row, _ in measured})
    heads = [f"ZeRO-{z}" + ("" if o == "none" else f", {o}") for z, o in kinds]
    text += _table(measured, meshes, kinds, heads, lambda row: (row["zero"], row["offload"]))
    text += "\n## Schedules\n\n"
    names = sorted({row["schedule"] for row, _ in measured})
    text += _table(measured, meshes, names, names, lambda row: row["schedule"])
    text += "\n## Other settings\n\n| setting | value | cases | worst |\n|---|---|---|---|\n"
    for name, words in SETTINGS.items():
        for value in dict.fromkeys(row[name] for row, _ in measured):
            if name == "weights":
                own = [e for row, e in measured if row[name] == value and row["zero"] == 3]
            else:
                own = [e for row, e in measured if row[name] == value]
            text += f"| {words} | {value} | {len(own)} | {_cell(own)} |\n"
    return text


def by_hand(page):
    """Return the part of the page that is written by hand: the long run."""
    return "".join(page.partition(LONG_RUN)[1:])


def _table(measured, meshes, columns, heads, column_of):
    lines = ["| mesh pp×dp×tp | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for mesh in meshes:
        cells = []
        for column in columns:
            own = [e for row, e in measured if row["mesh"] == mesh and column_of(row) == column]
            cells.append(_cell(own) if own else "–")
        lines.append(f"| {str(mesh).replace('x', '×')} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(errors):
    return " / ".join(f"{x:.0e}".replace("e-0", "e-") for x in _worst(errors))


def _worst(errors):
    errors = list(errors)
    return [max(getattr(e, name) for e in errors) for name in ("loss", "grad_norm", "weight")]
