"""Command-line paths without their `parallel3d.` prefix: `--mesh.tp 2`."""

from parallel3d.config.deepspeed_keys import TOP_LEVEL
from parallel3d.config.parallel3d_block import Parallel3DConfig


def full_path(path: str) -> str:
    """The path in the file that `path` on the command line means.

    A path below `parallel3d.` needs no prefix where no key of DeepSpeed's has it: DeepSpeed has
    blocks `checkpoint` and `pipeline` of its own, so that `checkpoint.every` is parallel3d's and
    `checkpoint.tag_validation` is DeepSpeed's.
    """
    section, _, inside = path.partition(".")
    if section not in Parallel3DConfig.model_fields:
        return path
    theirs = TOP_LEVEL.get(section)
    if theirs and (not inside or inside.partition(".")[0] in theirs.items):
        return path
    return f"parallel3d.{path}"
