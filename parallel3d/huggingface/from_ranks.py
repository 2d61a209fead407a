"""Write the trained weights from all ranks into a folder that transformers loads."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from torch import Tensor

from parallel3d.base.atomic import sync
from parallel3d.base.errors import TrainingError, remedy_of
from parallel3d.checkpoint.manifest import TOKENIZER
from parallel3d.config import CompleteConfig
from parallel3d.data.corpus import Corpus
from parallel3d.engine import Engine, HeldParameter
from parallel3d.huggingface.beside import beside_of, published_tokenizer
from parallel3d.huggingface.weight_files import (
    SHARD_BYTES,
    About,
    WeightFiles,
    create,
    line_after,
    publish,
    write_rest,
    write_tensor,
)
from parallel3d.mesh.agree import agree, gather_json, on_first
from parallel3d.mesh.mesh import Mesh


def save_weights(
    engine: Engine,
    mesh: Mesh,
    run: Path,
    *,
    config: CompleteConfig,
    corpus: Corpus | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write all weights in fp32 to run/weights, with the other files that transformers needs.

    Collective. The rank at dp = tp = 0 of each pipeline coordinate gathers and writes its weights
    one by one. If a disk is full, the old folder stays and all ranks raise TrainingError.
    """
    layout = WeightFiles(config.model, shard_bytes=shard_bytes)
    directory = run / "weights"
    unfinished = directory.with_name(f"{directory.name}.partial")

    @_ending_the_run(directory)
    def end() -> None:
        """Write the files beside the weights, and give the folder its name."""
        line = line_after(run, config.num_steps)
        end_of_text = corpus.end_of_text if corpus else None
        tokenizer = corpus.tokenizer_directory if corpus else None
        if (own := run / TOKENIZER).is_dir():  # a cache may be emptied
            tokenizer = own
        if tokenizer is not None and not any(tokenizer.iterdir()):
            tokenizer = None  # a corpus of token ids
        about = About(
            config,
            step=config.num_steps,
            tokens=line.get("tokens", config.num_steps * config.tokens_per_step),
            end_of_text=end_of_text,
            tokenizer=tokenizer or published_tokenizer(config),
            beside=beside_of(config, tokenizer, end_of_text),
            line=line,
        )
        missing = layout.places.keys() - set(chain.from_iterable(written))
        if missing:
            raise OSError(f"no rank wrote {min(missing)}")
        write_rest(unfinished, about, layout)
        publish(unfinished, directory)

    on_first(mesh, _ending_the_run(directory)(lambda: create(unfinished, layout)))
    write = _ending_the_run(directory)(lambda: _write(engine, mesh, unfinished, layout))
    written = gather_json(mesh, agree(mesh, write))
    on_first(mesh, end)


def _write(engine: Engine, mesh: Mesh, folder: Path, layout: WeightFiles) -> list[str]:
    """Gather the weights of this pipeline coordinate; return the names that this rank wrote."""
    writes = mesh.replicas.coord == mesh.tensor.coord == 0
    written: list[str] = []
    problem: OSError | None = None
    for held in engine.held:
        if held.copy:
            continue
        value = whole_parameter(engine, mesh, held)
        if writes and problem is None:
            try:
                for stored_name, tensor in layout.converted(held.name, value.cpu()).items():
                    write_tensor(folder, layout, stored_name, tensor)
                    written.append(stored_name)
            except OSError as error:
                problem = error  # continue: the other ranks need this one to gather
    if problem is not None:
        raise problem
    for file in {layout.places[stored_name].file for stored_name in written}:
        sync(folder / file)
    return written


def whole_parameter(engine: Engine, mesh: Mesh, held: HeldParameter) -> Tensor:
    """Return the whole fp32 value of a parameter. Collective over all ranks with parts of it."""
    value = engine.full_parameter(held)
    for part in held.cut.parts:
        value = mesh.messages.all_gather(value, mesh.peers(part.role).group, part.dim)
    return value


@contextmanager
def _ending_the_run(directory: Path) -> Iterator[None]:
    """Turn an OSError into a TrainingError, which ends the run with a remedy."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"cannot write the trained weights to {directory} ({error}); the checkpoints are not "
            f"affected: {remedy_of(error, 'mend the folder')} and run the same command again, or "
            "set parallel3d.run.save_weights to false"
        ) from error
