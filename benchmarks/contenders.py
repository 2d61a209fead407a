"""What checkpoint.py compares: the ways to save and load an engine's masters and moments."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from xxhash import xxh3_128

from parallel3d import models
from parallel3d.checkpoint.find import find_named
from parallel3d.checkpoint.load import load
from parallel3d.checkpoint.manifest import read_manifest, read_state
from parallel3d.checkpoint.on_disk import DiskPlace
from parallel3d.checkpoint.places import FoundCheckpoint
from parallel3d.checkpoint.save import Saver
from parallel3d.engine import Engine
from parallel3d.extras.calibrate.steps import SmallRun
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import LayerSpec
from parallel3d.pipeline.executor import Microbatch
from parallel3d.train.assembly import assemble

# What state.json must have of a run, and this is none.
UNUSED = ("tokens", "next_sample", "config", "mesh", "tokenizer", "corpus")


def trained(mesh: Mesh, run: SmallRun) -> tuple[Engine, list[LayerSpec]]:
    """An engine after one step, so that the moments are not zeros, and the model's layers."""
    config = run.config()
    parts = assemble(config, mesh)
    text = torch.randint(run.vocab, (1, run.seq + 1), device=mesh.device)
    parts.executor.run([Microbatch(text[:, :-1].contiguous(), text[:, 1:].contiguous())])
    parts.engine.step(1e-3)
    return parts.engine, models.layers(config.model)


class Contender:
    """Saves into `folder` and loads from it; collective."""

    stalls = False  # whether a save goes on behind the training

    def __init__(self, engine: Engine, mesh: Mesh, folder: Path) -> None:
        self.engine = engine
        self.mesh = mesh
        self.folder = folder
        if mesh.rank == 0:
            folder.mkdir()
        mesh.barrier()

    @property
    def loads(self) -> Mapping[str, Callable[[int], None]]:
        """The ways to load what was saved at a step, by what they are called in the report."""
        return {}

    def save(self, step: int) -> None:
        """Save; all of it is durable on return, unless it stalls."""
        raise NotImplementedError

    def wait(self) -> float:
        """Wait for a save that stalls; the seconds it took until all of it was durable."""
        return 0.0

    def _sync(self) -> None:
        """Have all files and folders on disk; each rank takes its share."""
        self.mesh.barrier()
        paths = [self.folder, *sorted(self.folder.rglob("*"))]
        for path in paths[self.mesh.rank :: self.mesh.world.size]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        self.mesh.barrier()


class Ours(Contender):
    """parallel3d's own."""

    def __init__(
        self,
        engine: Engine,
        mesh: Mesh,
        folder: Path,
        layers: Sequence[LayerSpec],
        hashed: bool = True,
        asynchronous: bool = False,
    ) -> None:
        super().__init__(engine, mesh, folder)
        self.stalls = asynchronous
        self._layers = layers
        self._hashed = hashed
        disk = DiskPlace(mesh, folder, hashed=hashed)
        self._saver = Saver(engine, mesh, layers, [disk], asynchronous=asynchronous, say=print)

    @property
    def loads(self) -> Mapping[str, Callable[[int], None]]:
        if self.stalls or not self._hashed:
            return {}
        return {"load": self._load, "load verified": self._load_verified}

    def save(self, step: int) -> None:
        self._started = time.perf_counter()
        self._saver.save({**dict.fromkeys(UNUSED), "step": step})
        if not self.stalls:
            self._saver.require_saved()

    def wait(self) -> float:
        self._saver.require_saved()
        return time.perf_counter() - self._started

    def _load_verified(self, step: int) -> None:
        found = find_named(self.folder, step, self.mesh)
        self._fill(found.folder, found.files, found.state)

    def _load(self, step: int) -> None:
        folder = self.folder / f"step-{step}"
        files = [name for name in read_manifest(folder).files if name != "state.json"]
        self._fill(folder, files, read_state(folder))

    def _fill(self, folder: Path, files: Sequence[str], state: Mapping[str, Any]) -> None:
        found = FoundCheckpoint(folder, tuple(files), state)
        load(found, engine=self.engine, mesh=self.mesh, layers=self._layers)


class Torch(Contender):
    """torch.distributed.checkpoint, of each rank's own shards.

    `whole`: each optimizer group's flat tensor as it is, which only the same mesh can load; else a
    tensor for each shard of a parameter, as users of FSDP save them.
    """

    def __init__(self, engine: Engine, mesh: Mesh, folder: Path, whole: bool, threads: int) -> None:
        super().__init__(engine, mesh, folder)
        self._whole = whole
        self._threads = threads
        # The class names the plan that is kept from save to save.
        self._planner = type(f"Planner{whole}", (DefaultSavePlanner,), {})

    @property
    def loads(self) -> Mapping[str, Callable[[int], None]]:
        return {"load": self._load}

    def save(self, step: int) -> None:
        writer = FileSystemWriter(
            self.folder / str(step), sync_files=True, thread_count=self._threads
        )
        with self._state() as state:
            dcp.save(state, storage_writer=writer, planner=self._planner(enable_plan_caching=True))
        if self.mesh.rank == 0:  # it leaves out the folders
            for path in (self.folder / str(step), self.folder):
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
        self.mesh.barrier()

    def _load(self, step: int) -> None:
        with self._state() as state:
            dcp.load(state, storage_reader=FileSystemReader(self.folder / str(step)))
        self.engine.states.finish_loading()

    @contextmanager
    def _state(self) -> Iterator[dict[str, Tensor]]:
        states = self.engine.states
        rank = self.mesh.rank
        found = {}
        with ExitStack() as stack:
            for number, block in enumerate(states.blocks):
                tensors = stack.enter_context(states.opened(number))
                if self._whole:
                    for kind in states.kinds:
                        found[f"{rank}|{number}|{kind}"] = _flat(tensors[0][kind])
                    continue
                for piece, kinds in zip(block, tensors, strict=True):
                    for kind in states.kinds:
                        found[f"{piece.held.name}|{piece.start}|{kind}"] = kinds[kind]
            yield found


class DeepSpeed(Contender):
    """DeepSpeed's own, which syncs nothing: that is done for it."""

    @property
    def loads(self) -> Mapping[str, Callable[[int], None]]:
        return {"load": self._load}

    def save(self, step: int) -> None:
        self.engine.deepspeed.save_checkpoint(str(self.folder), tag=str(step))
        self._sync()

    def _load(self, step: int) -> None:
        self.engine.deepspeed.load_checkpoint(str(self.folder), tag=str(step))


def _flat(part: Tensor) -> Tensor:
    """The whole tensor that a flat tensor is a part of."""
    return torch.empty(0, dtype=part.dtype, device=part.device).set_(part.untyped_storage())


def digest_of(engine: Engine) -> str:
    """The hash of this rank's masters and moments."""
    digest = xxh3_128()
    for number in range(len(engine.states.blocks)):
        with engine.states.opened(number) as tensors:
            for kinds in tensors:
                for kind in engine.states.kinds:
                    digest.update(kinds[kind].cpu().numpy().data.cast("B"))
    return digest.hexdigest()


def wipe(engine: Engine) -> None:
    """Fill masters and moments with zeros, so that a load that leaves one out is seen."""
    for number in range(len(engine.states.blocks)):
        with engine.states.opened(number, write=True) as tensors:
            for kinds in tensors:
                for kind in engine.states.kinds:
                    kinds[kind].zero_()
