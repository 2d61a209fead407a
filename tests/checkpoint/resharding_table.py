"""The table of docs/checkpoint.md: what arrived where, in the full run of test_resharding.py."""

import platform
from importlib.metadata import version

BEGIN, END = "<!-- resharding: begin -->", "<!-- resharding: end -->"
HEAD = """Saved on the mesh of the row, loaded on that of the column (pp×dp×tp), ZeRO 1 and 3 with
and without CPU offload of the optimizer on both sides, embeddings tied and untied: how many cases
arrived with every bit of every master weight and both moments, and with forward's weights equal to
the masters. The reference is what DeepSpeed's own getters gather on the source, and give on the
target. As the command below wrote it:

    pytest -n 0 -m slow tests/checkpoint/test_resharding.py --resharding-table docs/checkpoint.md

"""


def markdown(found, seconds):
    """`found`: what is wrong (a list, empty where all is equal) by (source, target)."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    equal = sum(not wrong for wrong in found.values())
    text = HEAD + (
        f"{equal} of {len(found)} cases bit-equal, in {seconds / 60:.0f} minutes on two cores "
        f"({packages}, {platform.machine()}, gloo).\n\n"
    )
    meshes = list(dict.fromkeys(source.mesh for source, _ in found))
    lines = [
        "| saved on \\ loaded on | " + " | ".join(map(_name, meshes)) + " |",
        "|---" * (len(meshes) + 1) + "|",
    ]
    for row in meshes:
        cells = [_cell(found, row, column) for column in meshes]
        lines.append(f"| {_name(row)} | " + " | ".join(cells) + " |")
    return text + "\n".join(lines) + "\n"


def insert(path, text):
    """Put the text between the two marks of a file; at its end, with the marks, if it has none."""
    old = path.read_text() if path.exists() else ""
    if BEGIN not in old:
        old = f"{old}\n{BEGIN}\n{END}\n"
    before, _, rest = old.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{text}{END}{rest.partition(END)[2]}")


def _name(mesh):
    return "×".join(map(str, mesh))


def _cell(found, source_mesh, target_mesh):
    wrongs = [
        wrong
        for (source, target), wrong in found.items()
        if (source.mesh, target.mesh) == (source_mesh, target_mesh)
    ]
    equal = sum(not wrong for wrong in wrongs)
    return f"{equal} equal" if equal == len(wrongs) else f"**{equal} of {len(wrongs)}**"
