"""The weights of a run, from its ranks into a folder that transformers loads."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from parallel3d.base.errors import TrainingError
from parallel3d.config import RunConfig
from parallel3d.data.corpus import Corpus
from parallel3d.engine import Engine
from parallel3d.huggingface.card import About, line_after, write_rest
from parallel3d.huggingface.files import Writer, create, publish
from parallel3d.huggingface.weight_files import SHARD_BYTES, WeightFiles
from parallel3d.mesh.agree import agree, gather_json
from parallel3d.mesh.mesh import Mesh


def save_weights(
    engine: Engine,
    mesh: Mesh,
    run: Path,
    *,
    config: RunConfig,
    corpus: Corpus | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write every weight in fp32 into run/weights, with all that transformers needs.

    Collective; raises TrainingError on all ranks where a disk is full, and leaves what stood there.
    The rank at dp = tp = 0 of each pipeline coordinate gathers its weights, one after the other,
    and writes each where it belongs, so that the files do not tell the mesh; no rank holds more
    than one. What is written has another name until all of it is on disk.
    """
    layout = WeightFiles(config.model, shard_bytes=shard_bytes)
    directory = run / "weights"
    unfinished = directory.with_name(f"{directory.name}.partial")

    def on_rank_0(work: Callable[[], None]) -> None:
        agree(mesh, _or_end_the_run(directory, lambda: work() if mesh.rank == 0 else None))

    def begin() -> None:
        create(unfinished, layout)

    def end() -> None:
        if missing := layout.places.keys() - {name for names in written for name in names}:
            raise OSError(f"no rank wrote {min(missing)}")
        write_rest(unfinished, _about(config, corpus, run), layout)
        publish(unfinished, directory)

    on_rank_0(begin)
    written = gather_json(mesh, _write(engine, mesh, directory, Writer(unfinished, layout), layout))
    on_rank_0(end)


def _write(
    engine: Engine, mesh: Mesh, directory: Path, writer: Writer, layout: WeightFiles
) -> list[str]:
    """Gather this pipeline coordinate's weights, and write them where this rank does."""
    writes = mesh.coord("dp") == 0 and mesh.coord("tp") == 0
    written: list[str] = []
    problem: TrainingError | None = None

    def write(name: str, value: Tensor) -> None:
        for theirs, tensor in layout.converted(name, value.cpu()).items():
            writer.write(theirs, tensor)
            written.append(theirs)

    for held in engine.held:
        if held.copy:
            continue
        value = engine.full_parameter(held)
        if held.cut.dim is not None:
            value = mesh.all_gather(value, "tp", held.cut.dim)
        if writes and problem is None:
            try:
                _or_end_the_run(directory, partial(write, held.name, value))()
            except TrainingError as error:
                problem = error  # the other ranks gather with this one to the end

    def close() -> None:
        if problem is not None:
            writer.close(synced=False)
            raise problem
        writer.close()

    agree(mesh, _or_end_the_run(directory, close))
    return written


def _about(config: RunConfig, corpus: Corpus | None, run: Path) -> About:
    return About(
        config,
        step=config.num_steps,
        tokens=config.num_steps * config.tokens_per_step,
        end_of_text=corpus.end_of_text if corpus else None,
        tokenizer=corpus.tokenizer_directory if corpus else None,
        line=line_after(run, config.num_steps),
    )


def _or_end_the_run(directory: Path, write: Callable[[], None]) -> Callable[[], None]:
    """`write`, whose errors of the system say what is left to do."""

    def written() -> None:
        try:
            write()
        except OSError as error:
            raise TrainingError(
                f"the trained weights cannot be written to {directory} ({error}); the checkpoints "
                "stand: make room and start the same command again, or set "
                "parallel3d.run.save_weights to false"
            ) from error

    return written
