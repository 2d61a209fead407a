"""The resharding section of docs/checkpoint.md, written by the full run of test_resharding.py."""

import platform
from importlib.metadata import version

BEGIN = "<!-- resharding: begin -->"
END = "<!-- resharding: end -->"
HEAD = """Each of these meshes (pp×dp×tp) loads the checkpoints of all of them, with ZeRO 1 and 3,
with and without CPU offload on both sides, and tied and untied embeddings. A case passes if all
bits of all master weights and moments are those that DeepSpeed's own getters return, and the
forward uses those weights:

    pytest -n 0 -m slow tests/checkpoint/test_resharding.py --resharding-table docs/checkpoint.md

"""


def markdown(faults, seconds):
    """Return the section's text.

    - `faults`: lists of faults by (source, target); an empty list if all bits are equal.
    - `seconds`: the duration of the run.
    """
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    failed = [f"{source} loaded as {target}" for (source, target), wrong in faults.items() if wrong]
    meshes = dict.fromkeys("×".join(map(str, source.mesh)) for source, _ in faults)
    return HEAD + (
        f"{len(faults) - len(failed)} of {len(faults)} cases passed, in {seconds / 60:.0f} minutes "
        f"on two cores ({packages}, {platform.machine()}, gloo).\nMeshes: {', '.join(meshes)}.\n"
        + "".join(f"- FAILED: {case}\n" for case in failed)
    )


def insert(path, text):
    """Put the text between the two marks of a file; at its end, with the marks, if it has none."""
    old = path.read_text() if path.exists() else ""
    if BEGIN not in old:
        old = f"{old}\n{BEGIN}\n{END}\n"
    before, _, after_begin = old.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{text}{END}{after_begin.partition(END)[2]}")
