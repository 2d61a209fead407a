"""The trained weights as safetensors, whole, under their global names."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from parallel3d.atomic import replace_text, replaced
from parallel3d.engine import Engine
from parallel3d.errors import TrainingError
from parallel3d.mesh.agree import agree, gather_json
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import appears

_INDEX = "model.safetensors.index.json"


def save_weights(engine: Engine, mesh: Mesh, directory: Path) -> None:
    """Write every weight in fp32, one file for each pipeline coordinate, and an index of them.

    Collective; raises TrainingError on all ranks where a disk is full. The rank at dp = tp = 0 of
    each pipeline coordinate gathers its stages' weights, one after the other, into host memory, and
    writes them; no rank holds the model. The index, in the form that Hugging Face uses, comes last:
    where it stands, all files are whole.
    """
    writer = mesh.coord("dp") == 0 and mesh.coord("tp") == 0
    weights: dict[str, Tensor] = {}
    for held in engine.held:
        if held.copy:
            continue
        value = engine.full_parameter(held)
        if held.cut.dim is not None:
            value = mesh.all_gather(value, "tp", held.cut.dim)
        if writer:
            weights[held.name] = value.cpu().contiguous()
    name = f"model-{mesh.coord('pp') + 1:05d}-of-{mesh.size('pp'):05d}.safetensors"

    def write() -> None:
        if writer:
            directory.mkdir(parents=True, exist_ok=True)
            with replaced(directory / name) as partial:
                save_file(weights, partial, metadata={"format": "pt"})

    agree(mesh, _or_end_the_run(directory, write))
    files = gather_json(mesh, {n: [name, w.nbytes] for n, w in weights.items()})
    entries = {n: entry for file in files for n, entry in file.items()}
    index = {
        "metadata": {"total_size": sum(size for _, size in entries.values())},
        "weight_map": {n: file for n, (file, _) in sorted(entries.items())},
    }

    def write_index() -> None:
        if mesh.rank == 0:
            for file in sorted({file for file, _ in entries.values()}):
                if not appears((directory / file).is_file):
                    raise OSError(f"{file} was written on another host, and is not here")
            replace_text(directory / _INDEX, f"{json.dumps(index, indent=1)}\n")

    agree(mesh, _or_end_the_run(directory, write_index))


def _or_end_the_run(directory: Path, write: Callable[[], None]) -> Callable[[], None]:
    """`write`, whose errors of the system say what is left to do."""

    def written() -> None:
        try:
            write()
        except (OSError, SafetensorError) as error:
            raise TrainingError(
                f"the trained weights cannot be written to {directory} ({error}); the checkpoints "
                "stand: make room and start the same command again, or set "
                "parallel3d.run.save_weights to false"
            ) from error

    return written
