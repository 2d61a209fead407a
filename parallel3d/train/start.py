"""The start of a run: its folder, corpus, checkpoint and final config."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from parallel3d.base.journal import open_journal
from parallel3d.base.say import Say
from parallel3d.checkpoint import free_space
from parallel3d.checkpoint.find import find_named, find_newest
from parallel3d.checkpoint.load import load
from parallel3d.checkpoint.manifest import TOKENIZER
from parallel3d.checkpoint.on_disk import DiskPlace
from parallel3d.checkpoint.places import FoundCheckpoint, Place
from parallel3d.checkpoint.state import Position, RunState
from parallel3d.config import CompleteConfig, ResolvedConfig, RunConfig
from parallel3d.config.arithmetic import batch_at, phases_of
from parallel3d.config.parallel3d_block import CheckpointConfig
from parallel3d.data.batches import tokens_of_epoch
from parallel3d.data.corpus import Corpus
from parallel3d.huggingface.initial_weights import find_weights, load_weights, tokenizer_warning
from parallel3d.mesh.agree import on_first
from parallel3d.mesh.device import describe_device, set_numerics
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import Nodes, find_nodes
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.models.common import Pretrained, pretrained_of
from parallel3d.plan.setting import leaves_weights_open
from parallel3d.train.assembly import Assembly
from parallel3d.train.bad_steps import left_out
from parallel3d.train.claim import Attempts, Claim
from parallel3d.train.ending import command_to_go_on
from parallel3d.train.known_hardware import described_hardware
from parallel3d.train.machines import check_machine, refuse_drift, refuse_unshared
from parallel3d.train.metrics import step_reached
from parallel3d.train.open_corpus import open_corpus

OpenPlaces = Callable[[CheckpointConfig, Mesh, Nodes, Path, Say], Sequence[Place]]
"""Opens places of the run in a folder, and says which ones. Collective."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The start of a run before the model is built; the same on every rank."""

    config: CompleteConfig
    """The final config, with the corpus's vocabulary and the number of steps."""
    settings: Mapping[str, object]
    """The config as the user wrote it; changed settings reset the count of failed attempts."""
    folder: Path
    """The run's folder, which may not exist yet."""
    digest: str
    """The digest by which the same config finds its unfinished run."""
    corpus: Corpus
    checkpoint: FoundCheckpoint | None = None
    """The checkpoint to load; None if training starts from step 0."""
    position: Position = field(default_factory=Position)
    """The position in the run and in its data."""
    pretrained: Path | None = None
    """The folder of published weights to start from, if there is no checkpoint."""
    rejected: Sequence[str] = ()
    """Newer checkpoints that cannot be used, and why."""
    places: Sequence[Place] = ()
    """The places that the run saves to; the first one is the disk."""

    @property
    def on_disk(self) -> FoundCheckpoint | None:
        """The checkpoint, unless it is in another place, from which the run will remove it."""
        return None if self.checkpoint and self.checkpoint.place else self.checkpoint


def find_start(
    requested: RunConfig,
    config: ResolvedConfig,
    mesh: Mesh,
    claim: Claim | None,
    console: Console,
    open_places: OpenPlaces,
) -> Start:
    """Return the start of a run. Collective.

    - `requested`: the config as it was read. A run that resumes keeps its batch unless this has
      `train_batch_size`.
    - `config`: `requested`, resolved for the mesh.
    - `claim`: rank 0's claim on the run's folder.
    - `open_places`: opens the places besides the disk to which the run saves.

    Prints the mesh, the folder, the corpus, the checkpoint and rejected checkpoints. Cheap checks
    come first. Raises on all ranks: ConfigError, DataError or CheckpointError if config, machine,
    corpus and checkpoint do not match, and the errors of `Attempts.check`.
    """
    begin(config, mesh, console)
    num_shown = len(config.notes)
    block = config.parallel3d
    nodes = find_nodes(mesh)
    settings = config.to_dict()
    folder, digest, exists = _find_folder(settings, mesh, claim)
    open_journal(folder)
    refuse_drift(settings, mesh, nodes)
    refuse_unshared(folder, block.run.directory, mesh, nodes)
    console.print(f"run     {folder}; to resume it, use this command:")
    console.print(f"        {command_to_go_on(config, folder)}")
    check_machine(config, mesh, nodes, console.print)
    corpus = open_corpus(config, mesh, nodes, console)
    pulse.doing("looking for a checkpoint")
    num_tokens = tokens_of_epoch(corpus.train, block.data.sequence_length)
    whole = config.with_corpus(corpus.vocab_size, num_tokens)
    say = console.print
    tokenizer = corpus.tokenizer_directory
    disk = DiskPlace(
        mesh,
        folder / "checkpoints",
        keep=block.checkpoint.keep,
        always=block.checkpoint.at,
        tokenizer=folder / TOKENIZER,  # the run's own copy, because a cache may be emptied
    )
    places = [disk, *open_places(block.checkpoint, mesh, nodes, folder, say)]
    own_folder = folder if exists else None
    checkpoint, rejected = _find_checkpoint(block.checkpoint.resume, mesh, places, own_folder)
    if checkpoint:
        kept = keep_batch(requested, config, checkpoint.state, say)
        whole = kept.with_corpus(corpus.vocab_size, num_tokens)
    whole = _with_weights(whole, mesh)
    for note in whole.notes[num_shown:]:
        say(note)
    _report(checkpoint, rejected, whole.num_steps, own_folder, say)
    position = Position()
    num_left_out = 0
    pretrained = None
    if checkpoint:
        position = RunState(whole, corpus).position_in(checkpoint.state, checkpoint.folder, say)
        num_left_out = left_out(checkpoint.state)
    else:
        pretrained = _find_pretrained(whole, mesh, tokenizer, say)
    return Start(
        config=whole.resumed(position.step, position.next_sample, num_left_out),
        settings=settings,
        folder=folder,
        digest=digest,
        corpus=corpus,
        checkpoint=checkpoint,
        position=position,
        pretrained=pretrained,
        rejected=rejected,
        places=places,
    )


def begin(config: RunConfig, mesh: Mesh, console: Console) -> None:
    """Set this process's numerics; print ranks, devices and the config's notes."""
    train = config.parallel3d.train
    set_numerics(tf32=train.tf32, deterministic=train.deterministic)
    console.print(mesh.picture(), *describe_device(mesh.device), *config.notes, sep="\n")


def _find_folder(
    settings: Mapping[str, object], mesh: Mesh, claim: Claim | None
) -> tuple[Path, str, bool]:
    """Return the run's folder, its digest, and whether the folder exists."""

    def look() -> tuple[str, str, bool]:
        assert claim, "rank 0 claims the folder before it joins the mesh"
        exists = claim.folder.exists()
        if exists:
            Attempts(claim.folder, settings, claim.config).check(step_reached(claim.folder))
        return str(claim.folder), claim.config, exists

    folder, digest, exists = on_first(mesh, look)
    return Path(folder), digest, exists


def _with_weights(config: CompleteConfig, mesh: Mesh) -> CompleteConfig:
    """Resolve parallel3d.pipeline.weights if it is "auto", by the device of rank 0.

    On CPUs without a description, the least free host memory of a rank decides.
    """
    if not leaves_weights_open(config):
        return config
    known = described_hardware(config, mesh.device)
    host_bytes = None
    if mesh.device.type == "cpu":
        rows = mesh.messages.gather_floats([free_space.free_memory(mesh.local_size)])
        host_bytes = int(min(row[0] for row in rows))

    def look() -> tuple[dict[str, str], tuple[str, ...]]:
        from parallel3d.plan.report.plan_rows import choose_gathers  # only rank 0 needs it

        return choose_gathers(config, known, host_bytes)

    return config.with_gathers(*on_first(mesh, look))


def _find_pretrained(config: RunConfig, mesh: Mesh, tokenizer: Path, say: Say) -> Path | None:
    """Return the folder of model.from_pretrained, if set; report it, and warn of its tokenizer."""
    model = config.parallel3d.model
    origin = pretrained_of(model)
    if origin is None:
        return None
    assert isinstance(origin, Pretrained), "it was resolved with the config"
    folder = find_weights(model, origin, mesh)
    at = f" at {origin.revision}" if origin.revision else ""
    say(f"weights of {origin.folder}{at}")
    if warning := on_first(mesh, lambda: tokenizer_warning(folder, tokenizer, origin.folder)):
        say(warning)
    return folder


def _find_checkpoint(
    resume: int | str, mesh: Mesh, places: Sequence[Place], folder: Path | None
) -> tuple[FoundCheckpoint | None, list[str]]:
    """Return the checkpoint to start from, and which were rejected and why.

    `folder` is the run's, if it exists. Collective. Raises CheckpointError on all ranks if a
    checkpoint that was named cannot be used.
    """
    checkpoint = None
    rejected = list[str]()
    # Each host's torchrun counts its own restarts, and none for hosts that come.
    counts = mesh.messages.gather_floats([mesh.restart_count])
    is_restart = mesh.is_elastic or any(count for (count,) in counts)
    if folder and (is_restart or resume == "auto"):
        # After a restart the run's own newest checkpoint is newer than the one that was named.
        checkpoint, rejected = find_newest(places)
    if checkpoint is None and resume not in ("auto", "none"):
        own = folder / "checkpoints" if folder else Path()
        checkpoint = find_named(own, resume, mesh)
    return checkpoint, rejected


def _report(
    checkpoint: FoundCheckpoint | None,
    rejected: Sequence[str],
    num_steps: int,
    folder: Path | None,
    say: Say,
) -> None:
    """Say which checkpoint was found, which were rejected, or that `folder` has none."""
    for reason in rejected:
        say(f"resume  {reason}")
    if checkpoint:
        say(f"resume  from {checkpoint.folder}: step {checkpoint.step} of {num_steps}")
    elif folder:
        why = "no usable checkpoint" if rejected else "no checkpoint"
        say(f"resume  NOTHING TO RESUME: {folder} has {why}; starting from step 0")


def keep_batch(
    requested: RunConfig, config: ResolvedConfig, state: Mapping[str, Any], say: Say
) -> ResolvedConfig:
    """Return `config` with the batch that a checkpoint's run had; say so if it was another.

    A config that sets `train_batch_size` or `train.batch_schedule` asks for a batch.

    - `requested`: the config as it was read.
    - `state`: the checkpoint's state.json.
    """
    was = state["config"]
    batch = int(was["train_batch_size"])
    if schedule := was["parallel3d"]["train"].get("batch_schedule"):
        length = int(was["parallel3d"]["data"]["sequence_length"])
        batch = batch_at(phases_of(schedule, length), int(state["next_sample"]))
    other = config.global_batch_size
    if requested.train_batch_size is not None or batch == other:
        return config
    mesh = config.mesh
    # On hosts of this size "node" means the number that it has been resolved to.
    host_size = mesh.sizes.ranks // (mesh.pp * mesh.num_copies)
    kept = requested.resolve(mesh.sizes.ranks, batch, host_size)
    say(
        f"batch   stays {batch}: {kept.num_microbatches} microbatches of {kept.micro_batch_size} "
        f"(for {other}: --train_batch_size {other})"
    )
    return kept


def restore(start: Start, mesh: Mesh, parts: Assembly) -> None:
    """Load the start's checkpoint or published weights, if any, into the engine; collective."""
    pulse.doing("loading the checkpoint")
    if start.pretrained:
        load_weights(
            start.pretrained,
            start.config.model,
            engine=parts.engine,
            mesh=mesh,
            layers=parts.layers,
        )
    if checkpoint := start.checkpoint:
        if checkpoint.place:
            checkpoint.place.note_restart(checkpoint.step)
        load(checkpoint, engine=parts.engine, mesh=mesh, layers=parts.layers)
