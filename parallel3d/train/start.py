"""The start of a run: its folder, corpus, checkpoint and final config."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from rich.console import Console

from parallel3d.base.errors import ConfigError, DataError, TrainingError
from parallel3d.base.journal import open_journal
from parallel3d.checkpoint import find, free_space
from parallel3d.checkpoint.in_memory import HostMemory
from parallel3d.checkpoint.load import load
from parallel3d.checkpoint.state import Position, RunState, changes
from parallel3d.config import CompleteConfig, ResolvedConfig, RunConfig
from parallel3d.data.batches import check_length, tokens_of_epoch
from parallel3d.data.corpus import Corpus, Place
from parallel3d.data.prepare import pack, prepare
from parallel3d.data.prepare_progress import shown_progress
from parallel3d.data.show import describe_skips
from parallel3d.data.sources import no_progress
from parallel3d.data.streams import open_shard_cache
from parallel3d.engine.swap import check_writable
from parallel3d.huggingface.initial_weights import find_weights, load_weights, tokenizer_warning
from parallel3d.mesh.agree import agree, gather_json, on_first
from parallel3d.mesh.device import describe_device, set_numerics
from parallel3d.mesh.join import STARTUP_TIMEOUT
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import Nodes, find_nodes, wait_until
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.models.common import Pretrained, pretrained_of
from parallel3d.plan.impossible import MOST_BYTES, refuse_impossible
from parallel3d.plan.setting import Setting, leaves_weights_open
from parallel3d.train.assembly import Assembly
from parallel3d.train.bad_steps import left_out
from parallel3d.train.claim import Attempts, Claim, token_of
from parallel3d.train.ending import command_to_go_on
from parallel3d.train.known_hardware import described_hardware
from parallel3d.train.memory import note_restart, open_memory
from parallel3d.train.metrics import step_reached
from parallel3d.train.progress import in_words

Say = Callable[[str], None]


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
    checkpoint: find.FoundCheckpoint | None = None
    """The checkpoint to load; None if training starts from step 0."""
    position: Position = field(default_factory=Position)
    """The position in the run and in its data."""
    pretrained: Path | None = None
    """The folder of published weights to start from, if there is no checkpoint."""
    rejected: Sequence[str] = ()
    """Newer checkpoints that cannot be used, and why."""
    memory: HostMemory | None = None
    """The memory of the run's hosts, if it is used."""

    @property
    def on_disk(self) -> find.FoundCheckpoint | None:
        """The checkpoint, unless it is in memory, from which the run will remove it."""
        return None if self.checkpoint and self.checkpoint.copies else self.checkpoint

    @property
    def tier(self) -> str | None:
        """Where the checkpoint is: "memory" or "disk"."""
        if self.checkpoint is None:
            return None
        return "disk" if self.on_disk else "memory"

    @property
    def tokenizer(self) -> Path | None:
        """The corpus's tokenizer folder; None if the corpus consists of ids only."""
        folder = self.corpus.tokenizer_directory
        return folder if any(folder.iterdir()) else None


def find_start(config: ResolvedConfig, mesh: Mesh, claim: Claim | None, console: Console) -> Start:
    """Return the start of a run; `claim` is rank 0's claim on the run's folder. Collective.

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
    config = _with_weights(config.with_corpus(corpus.vocab_size, num_tokens), mesh)
    for note in config.notes[num_shown:]:
        console.print(note)
    own = folder if exists else None
    say = console.print
    memory = open_memory(block.checkpoint, mesh, nodes, folder, say)
    checkpoint, rejected = _find_checkpoint(config, mesh, own, say, memory)
    position = Position()
    num_left_out = 0
    pretrained = None
    if checkpoint:
        position = RunState(config, corpus).position_in(checkpoint.state, checkpoint.folder, say)
        num_left_out = left_out(checkpoint.state)
    else:
        pretrained = _find_pretrained(config, mesh, corpus.tokenizer_directory, say)
    config = config.resumed(position.step, position.next_sample, num_left_out)
    return Start(
        config=config,
        settings=settings,
        folder=folder,
        digest=digest,
        corpus=corpus,
        checkpoint=checkpoint,
        position=position,
        pretrained=pretrained,
        rejected=rejected,
        memory=memory,
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

    def look() -> tuple[str, str]:
        from parallel3d.plan.report.plan_rows import weights_for  # only rank 0 needs the planner

        return weights_for(Setting.from_config(config), known, host_bytes)

    return config.with_weights(*on_first(mesh, look))


def refuse_drift(settings: Mapping[str, object], mesh: Mesh, nodes: Nodes) -> None:
    """Raise ConfigError on all ranks unless every rank has read rank 0's settings.

    Paths of the text and of the cache may differ, as in `changes`.
    """
    of_first = on_first(mesh, lambda: settings)

    def look() -> None:
        own = json.loads(json.dumps(settings))
        different = list(changes(of_first, own))
        if different:
            raise ConfigError(
                f"{different[0]}: rank 0 on {nodes.hosts[0]} has the first value, and rank "
                f"{mesh.rank} on {nodes.hosts[mesh.rank]} the second; start all ranks with the "
                "same config and options"
            )

    agree(mesh, look)


def refuse_unshared(folder: Path, directory: str, mesh: Mesh, nodes: Nodes) -> None:
    """Raise ConfigError on all ranks unless every node sees rank 0's lock beside `folder`."""
    if len(set(nodes.machines)) == 1:
        return
    token = on_first(mesh, lambda: token_of(folder))

    def look() -> None:
        is_first = nodes.first(mesh.rank) == mesh.rank
        if is_first and not wait_until(lambda: token_of(folder) == token):
            raise ConfigError(
                f'parallel3d.run.directory = "{directory}": {folder.parent.absolute()} on '
                f"{nodes.hosts[mesh.rank]} (rank {mesh.rank}) is not the folder that rank 0 on "
                f"{nodes.hosts[0]} writes to; use a folder that all nodes share"
            )

    agree(mesh, look)


def check_machine(config: RunConfig, mesh: Mesh, nodes: Nodes, say: Say) -> None:
    """Raise ConfigError on all ranks if the run cannot fit, or its NVMe folders are not writable.

    Called before the corpus and the model, which take long. Warns if a tp group spans hosts.
    """
    if torn := nodes.torn(mesh.tensor.size):
        others = f", and {len(torn) - 1} more groups" if torn[1:] else ""
        say(
            f"mesh    tp = {mesh.tensor.size} SPANS HOSTS: {nodes.in_words(torn[0])}{others}; "
            "every layer waits for the network. Use a tp that divides the ranks of a node, and "
            "number each node's ranks consecutively (srun --distribution=block)"
        )

    def look() -> None:
        host = (psutil.virtual_memory().total + psutil.swap_memory().total) // mesh.local_size
        device = 0
        if mesh.device.type != "cpu":
            ask = getattr(torch.get_device_module(mesh.device), "mem_get_info", None)
            device = ask(mesh.device)[1] if ask else MOST_BYTES
        refuse_impossible(config, mesh.world.size, host + device)
        for name in ("offload_optimizer", "offload_param"):
            section = getattr(config.zero_optimization, name)
            if section.device == "nvme":
                setting = f"zero_optimization.{name}.nvme_path"
                check_writable(section.nvme_path, mesh, setting)

    agree(mesh, look)


def open_corpus(config: ResolvedConfig, mesh: Mesh, nodes: Nodes, console: Console) -> Corpus:
    """Return the corpus on every rank; the first rank of each node prepares it if necessary.

    Raises Parallel3DError on all ranks if one of them cannot use it.
    """
    pulse.doing("opening the corpus, or waiting for it to be prepared")
    first = nodes.first(mesh.rank)
    data = config.parallel3d.data

    def prepared() -> Place | None:
        if mesh.rank != first:
            return None
        with nullcontext(no_progress) if console.quiet else shown_progress() as progress:
            corpus = prepare(data, progress)
        check_length(corpus, data.sequence_length, config.largest_batch)
        return corpus.place()

    try:
        places = gather_json(mesh, agree(mesh, prepared), aside=True)
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        raise TrainingError(
            f"rank {mesh.rank} on {nodes.hosts[mesh.rank]} has waited for "
            f"{in_words(STARTUP_TIMEOUT.total_seconds())} until another node prepares the corpus. "
            "Prepare it before the run: `parallel3d prepare --config ...` on each node, or once in "
            "a parallel3d.data.cache that all nodes share"
        ) from None
    refuse_different(places, nodes)
    corpus = Corpus.at(places[first], open_shard_cache(data))
    corpus = pack(corpus, data)
    console.print(*corpus_lines(corpus), sep="\n")
    return corpus


def corpus_lines(corpus: Corpus) -> Iterator[str]:
    """Yield the lines about a run's corpus, and about what was left out of it."""
    train = len(corpus.train)
    held_out = len(corpus.held_out)
    yield (
        f"corpus  {corpus.num_documents:,} documents, {train:,} tokens + {held_out:,} held out (of "
        f"{corpus.held_out.num_documents:,} documents)"
    )
    yield f"        vocabulary {corpus.vocab_size:,}, unigram entropy {corpus.unigram_entropy:.4f}"
    unknown_share = max(part.facts.unknown_share or 0.0 for part in corpus.parts or (corpus,))
    if unknown_share:
        unknown = f"{unknown_share:.0%} of the text"
        yield f"WARNING: the tokenizer does not know {unknown}; use another one"
    for name, part in corpus.validation.items():
        documents = part.held_out.num_documents
        yield f"        validation {name}: {documents:,} documents, {len(part.held_out):,} tokens"
        common = part.facts.num_in_training
        if common:
            yield (
                f"WARNING: {common:,} of the {documents:,} documents of data.validation.{name} are "
                "also in the training text, so its loss is too low; remove them from one of the two"
            )
    for name, part in {"": corpus, **corpus.validation}.items():
        if part.facts.skipped:
            where = f" of validation {name}" if name else ""
            counts = describe_skips(part.facts.skipped)
            yield f"        left out{where}: {counts} (prepare.py lists the first 20)"


def refuse_different(places: list[Place | None], nodes: Nodes) -> None:
    """Raise DataError on all ranks unless every node has prepared the same text.

    `places` has the description of the corpus by the first rank of each node, None for other ranks.
    With data.on_error = "skip", a file that one node cannot read changes every sample after it.
    """
    keys = {rank: _keys(place) for rank, place in enumerate(places) if place is not None}
    for rank, rank_keys in keys.items():
        differing = sorted({name for name, _ in keys[0].items() ^ rank_keys.items()})
        if differing:
            raise DataError(
                f"{differing[0]} is not the same on {nodes.hosts[0]} and {nodes.hosts[rank]}: "
                "only one of them could read some file or data set. Run `parallel3d prepare "
                "--config ...` on both and compare, or share a folder: parallel3d.data.cache"
            )


def _keys(place: Place) -> dict[str, str]:
    sets = {f"data.validation.{name}": part["key"] for name, part in place["validation"].items()}
    return {"the corpus": place["key"], **sets}


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
    config: CompleteConfig, mesh: Mesh, folder: Path | None, say: Say, memory: HostMemory | None
) -> tuple[find.FoundCheckpoint | None, list[str]]:
    """Return the checkpoint to start from, and which were rejected and why; report both.

    Collective. Raises CheckpointError on all ranks if a checkpoint that was named cannot be used.
    """
    resume = config.parallel3d.checkpoint.resume
    own = folder / "checkpoints" if folder else None
    checkpoint = None
    rejected = list[str]()
    # Each host's torchrun counts its own restarts, and none for hosts that come.
    counts = mesh.messages.gather_floats([mesh.restart_count])
    is_restart = mesh.is_elastic or any(count for (count,) in counts)
    if own and (is_restart or resume == "auto"):
        # After a restart the run's own newest checkpoint is newer than the one that was named.
        checkpoint, rejected = find.find(own, "auto", mesh, memory)
    if checkpoint is None and resume not in ("auto", "none"):
        checkpoint, rejected = find.find(own or Path(), resume, mesh)
    for reason in rejected:
        say(f"resume  {reason}")
    if checkpoint:
        say(f"resume  from {checkpoint.folder}: step {checkpoint.step} of {config.num_steps}")
    elif folder:
        why = "no usable checkpoint" if rejected else "no checkpoint"
        say(f"resume  NOTHING TO RESUME: {folder} has {why}; starting from step 0")
    return checkpoint, rejected


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
        if checkpoint.copies:
            on_first(mesh, lambda: note_restart(start.folder, checkpoint.step))
        load(checkpoint, engine=parts.engine, mesh=mesh, layers=parts.layers)
