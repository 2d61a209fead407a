"""Checkpoints in the memory of the hosts, which outlive the processes that wrote them.

Each rank writes its file to a folder in its host's memory, and sends it to a rank of the next host.
With copies of ZeRO's shards on other hosts (mesh.dp_shards) nothing is sent: a rank that holds a
copy writes the same file.
A host's step-N therefore has the files of its own ranks, those of the host before it, state.json,
and the manifest of the whole checkpoint. docs/checkpoint.md describes the folder.
"""

import json
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal
from xxhash import xxh3_128_hexdigest

from parallel3d.base.errors import CheckpointError, ConfigError, TrainingError
from parallel3d.base.journal import record
from parallel3d.base.say import Say
from parallel3d.checkpoint import disk, free_space
from parallel3d.checkpoint.manifest import (
    MANIFEST,
    STATE,
    Entry,
    Manifest,
    check_file,
    check_state,
    manifest_bytes,
    read_manifest,
    read_state,
    state_bytes,
    step_folders,
    tensor_files,
)
from parallel3d.checkpoint.places import (
    Copies,
    Entries,
    FoundCheckpoint,
    Place,
    WriteFiles,
    merged,
)
from parallel3d.config.parallel3d_block import CheckpointConfig
from parallel3d.extras.guard.restarts import Restarts
from parallel3d.mesh.agree import agree, gather_json, on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import Nodes

Plan = Sequence[tuple[str, int, int]]  # name of a file, the rank that sends, the rank that receives


def open_memory(
    settings: CheckpointConfig, mesh: Mesh, nodes: Nodes, folder: Path, say: Say
) -> "HostMemory":
    """Return the memory of the hosts of the run in `folder`. Collective.

    Raises ConfigError on all ranks if one of them cannot write to checkpoint.in_memory_folder.
    """
    root = Path(settings.in_memory_folder)

    def require_folder() -> None:
        if not os.access(root, os.W_OK | os.X_OK):
            raise ConfigError(
                f'parallel3d.checkpoint.in_memory_folder: "{root}" on {nodes.hosts[mesh.rank]}: '
                f"rank {mesh.rank} cannot write there; name a folder in memory of each host"
            )

    agree(mesh, require_folder)
    memory = HostMemory(mesh, nodes, root, Restarts(folder))
    memory.every = settings.in_memory_every
    hosts = "a copy on the next host" if memory.peers else "ONE HOST: no copy on another one"
    if memory.has_copies:
        hosts = "each shard from the hosts with its copies"
    say(f"memory  every {settings.in_memory_every} steps to {memory.folder}; {hosts}")
    return memory


class HostMemory(Place):
    """Keeps at most two steps of one run in the memory of its hosts."""

    tier = "memory"
    waits_for_others = False

    def __init__(self, mesh: Mesh, nodes: Nodes, root: Path, restarts: Restarts) -> None:
        """Look at the folder, without creating it. Collective.

        - `root`: a folder in the host's memory.
        - `restarts`: the run's unique name, which ends in "-" and an id, and the steps that are
          not restored again.
        """
        self._mesh = mesh
        self._beside = mesh.beside()
        self._restarts = restarts
        name, self._refused = on_first(mesh, restarts.name_and_refused)
        machines = list(dict.fromkeys(nodes.machines))
        self._host_of = [machines.index(machine) for machine in nodes.machines]
        hosts: list[list[int]] = [[] for _ in machines]
        for rank, host in enumerate(self._host_of):
            hosts[host].append(rank)
        self._here = hosts[self._host_of[mesh.rank]]
        self._place = self._here.index(mesh.rank)  # the first rank of a host does its common work
        self.peers: dict[int, int] = {}
        """Rank of the next host that keeps a copy of a rank's file; empty on one host."""
        if len(hosts) > 1:
            for own, after in zip(hosts, [*hosts[1:], hosts[0]], strict=True):
                for place, rank in enumerate(own):
                    self.peers[rank] = after[place % len(after)]
        holders = self._find_holders()
        self.has_copies = bool(holders)
        """True if ranks of other hosts hold each rank's shards, and so write its file, too."""
        self.peers |= holders
        self.also_writes = [rank for rank, peer in holders.items() if peer == mesh.rank]
        self.folder = root / f"parallel3d-{os.getuid()}" / name

    def _find_holders(self) -> dict[int, int]:
        """Return by rank the next one on another host with a copy of its shards. Collective.

        It is empty unless all ranks have such a copy.
        """
        copies = self._mesh.copies
        if copies.size == 1:
            return {}
        holders: dict[int, int] = {}
        for rank, group in enumerate(gather_json(self._mesh, copies.ranks, aside=True)):
            place = group.index(rank)
            for other in [*group[place:], *group[:place]]:
                if self._host_of[other] != self._host_of[rank]:
                    holders.setdefault(rank, other)
        return holders if len(holders) == self._mesh.world.size else {}

    def missing_bytes(self, bytes_by_rank: Sequence[float]) -> int:
        """Return the bytes that this host lacks for another step; 0 if it fits."""
        if self._is_private() and len(step_folders(self.folder)) > 1:
            return 0  # the older one is removed first
        ranks = [*self._here, *(r for r, peer in self.peers.items() if peer in self._here)]
        num_bytes = int(sum(bytes_by_rank[r] for r in ranks))
        num_ranks = len(self._here)
        memory = free_space.missing_memory_bytes(num_bytes // num_ranks, num_ranks) * num_ranks
        return max(memory, free_space.missing_disk_bytes(self.folder.parents[1], num_bytes))

    def describe_missing(self, missing_bytes: int, num_bytes: int) -> str:
        """Return why a step is not kept."""
        return (
            f"{self.folder.parent}: {decimal(missing_bytes)} of memory missing on a host; "
            "enlarge it (docker: --shm-size), or set checkpoint.in_memory_folder"
        )

    def write(self, state: Mapping[str, Any], write_files: WriteFiles) -> None:
        """Save a step. Collective, on a group of its own."""
        mesh = self._beside
        folder = self.folder / f"step-{state['step']}"
        unfinished = folder.with_name(f"{folder.name}.tmp")
        try:
            text = on_first(mesh, lambda: state_bytes(state).decode())
            self._on_each_host(lambda: self._make_room(unfinished))
            own = gather_json(mesh, agree(mesh, lambda: write_files(unfinished)), aside=True)
            files = merged(own)
            plan = []
            if self.has_copies:
                _require_equal(own, files)
            else:
                for rank, peer in self.peers.items():
                    plan += [(name, rank, peer) for name in own[rank]]
            self._copy(unfinished, plan, files)
            self._on_each_host(
                lambda: disk.publish(unfinished, folder, state["step"], text.encode(), files)
            )
        except TrainingError:
            if self._place == 0:
                with suppress(OSError):
                    disk.remove_folder(unfinished)
            raise

    def report_failure(self) -> str:
        """Report the first of several saves that fail."""
        if self.num_failures > 1:
            return ""
        if self._mesh.rank == 0:
            record("not_saved", tier=self.tier, reason=self.problem)
        return f"NOT SAVED IN MEMORY: {self.problem}. Training continues"

    def note_restart(self, step: int) -> None:
        """Record that a step is about to be loaded, so that it is not loaded again and again."""
        on_first(self._mesh, lambda: self._restarts.note(step))

    def forget_after(self, step: int) -> list[str]:
        """Forget the steps after `step`; with -1 all of them. Collective.

        A run that goes on from elsewhere gets another name, because a host that is absent may come
        back with steps that are no longer part of the run.
        """

        def current_name() -> str:
            if step < 0:
                self._restarts.rename()
            return self._restarts.name

        self._keep(on_first(self._mesh, current_name), step)
        return []

    def end(self) -> None:
        """Leave the memory free."""
        self._keep("", -1)

    def _keep(self, name: str, step: int) -> None:
        """Remove this host's steps after `step`, and those under other names of this run.

        Later saves have the name; with "" everything is removed.
        """
        prefix = f"{self.folder.name.rpartition('-')[0]}-"
        self.folder = self.folder.with_name(name or f"{prefix}0")
        if self._place or not self._is_private():
            return
        with suppress(OSError):
            for path in self.folder.parent.glob("*"):
                if path.name.startswith(prefix):
                    for number, folder in step_folders(path):
                        if path.name != name or number > step:
                            disk.remove_checkpoint(folder)
                    if path.name != name:
                        disk.remove_folder(path)

    def steps(self) -> list[tuple[int, str]]:
        """Return the steps that some host holds, and the digests of their manifests. Collective."""
        own = []
        if self._place == 0 and self._is_private():
            for step, path in step_folders(self.folder):
                try:
                    own.append([step, _digest(read_manifest(path))])
                except CheckpointError as error:
                    record("copy_rejected", step=step, file=MANIFEST, reason=str(error))
        steps: set[tuple[int, str]] = set()
        for of_rank in gather_json(self._mesh, own, aside=True):
            steps.update((step, digest) for step, digest in of_rank)
        return sorted(steps, reverse=True)

    def verify(self, step: int, version: str) -> FoundCheckpoint:
        """Return a step whose files all have an intact copy on some host. Collective.

        Each rank reads a share of its host's files in full. Raises CheckpointError on all ranks if
        a file has no intact copy, or the step is refused.

        - `version`: the digest of the step's manifest.
        """
        if step <= self._refused:
            raise CheckpointError("in memory is not used again: the run failed twice after it")
        folder = self.folder / f"step-{step}"
        manifest = self._manifest(step, version)
        share = sorted(manifest.files)[self._place :: len(self._here)]
        share = [name for name in share if (folder / name).exists()]
        reasons = {name: check_file(folder, name, manifest.files[name]) for name in share}
        for name, reason in reasons.items():
            if reason:
                record("copy_rejected", step=step, file=name, reason=reason)
                (folder / name).unlink(missing_ok=True)
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, of_rank in enumerate(gather_json(self._mesh, reasons, aside=True)):
            for name, reason in of_rank.items():
                if not reason:
                    holders[name].append(rank)
        files, state = self._read(folder, manifest, holders[STATE])
        for name in sorted(files):
            _require_copy(name, holders[name])
        fetch = partial(self._fetch, holders, Manifest(step, files))
        return FoundCheckpoint(folder, tensor_files(files), state, Copies(holders, fetch), self)

    def _read(
        self, folder: Path, manifest: Manifest, readers: Sequence[int]
    ) -> tuple[dict[str, Entry], dict[str, Any]]:
        """Return the files and the state of a step, as the first of `readers` has them."""
        _require_copy(STATE, readers)
        own = [manifest.files, read_state(folder)] if readers[0] == self._mesh.rank else None
        entries, state = json.loads(self._mesh.messages.broadcast_text(json.dumps(own), readers[0]))
        check_state(state, manifest.step)
        return {name: Entry(*entry) for name, entry in entries.items()}, state

    def _manifest(self, step: int, digest: str) -> Manifest:
        """Return the manifest of this host's copy of a step; an empty one if it has no copy."""
        with suppress(CheckpointError):
            manifest = read_manifest(self.folder / f"step-{step}")
            if _digest(manifest) == digest:
                return manifest
        return Manifest(step, {})

    def _fetch(
        self,
        holders: Mapping[str, Sequence[int]],
        manifest: Manifest,
        names: Collection[str],
    ) -> None:
        """Copy the files that each rank needs to its host, once per host."""
        own = sorted({*names, STATE})
        missing_here = [name for name in own if not {*holders[name]} & {*self._here}]
        wanted = gather_json(self._mesh, missing_here, aside=True)
        plan: dict[tuple[int, str], tuple[str, int, int]] = {}
        for rank, missing in enumerate(wanted):
            for name in missing:
                source = holders[name][len(plan) % len(holders[name])]
                plan.setdefault((self._host_of[rank], name), (name, source, rank))
        folder = self.folder / f"step-{manifest.step}"

        def prepare() -> None:
            if any(wanted[rank] for rank in self._here):
                self._make_private()
                if not self._manifest(manifest.step, _digest(manifest)).files:
                    disk.make_folder(folder)
                    disk.write_file(folder / MANIFEST, [manifest_bytes(*manifest)])

        self._on_each_host(prepare)
        self._copy(folder, [*plan.values()], manifest.files)

    def _copy(self, folder: Path, plan: Plan, files: Mapping[str, Entry]) -> None:
        """Copy files between hosts and compare them with their hashes. Collective."""
        mesh = self._beside

        def blocks(name: str) -> Iterable[torch.Tensor]:
            # A private mapping: the file's pages are sent without a copy.
            data = torch.from_file(str(folder / name), size=files[name].size, dtype=torch.uint8)
            return torch.split(data, disk.BLOCK)

        def transfer() -> None:
            sends = []
            for name, source, target in plan:
                if source == mesh.rank:
                    sends += [mesh.messages.send_aside(block, target) for block in blocks(name)]
            problems = []
            for name, source, target in plan:
                if target == mesh.rank:
                    problems.append(_receive(mesh, folder / name, files[name], source))
            for send in sends:
                send.wait()
            if any(problems):
                raise TrainingError("; ".join(filter(None, problems)))

        agree(mesh, transfer)

    def _on_each_host(self, work: Callable[[], None]) -> None:
        """Call `work` on one rank of each host; raises TrainingError on all ranks if one fails."""
        reporting = disk.reporting(self.folder)
        agree(self._beside, lambda: reporting(work)() if self._place == 0 else None)

    def _make_room(self, unfinished: Path) -> None:
        self._make_private()
        disk.remove_leftovers(self.folder)
        for _, path in step_folders(self.folder)[1:]:
            disk.remove_checkpoint(path)
        disk.make_folder(unfinished)

    def _make_private(self) -> None:
        self.folder.parent.mkdir(mode=0o700, exist_ok=True)
        if not self._is_private():
            raise OSError(f"{self.folder.parent} is not a folder of this user alone")

    def _is_private(self) -> bool:
        """True if the folder of this user exists, and nobody else can read or write it."""
        with suppress(OSError):
            status = self.folder.parent.lstat()
            is_closed = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
            return is_closed and status.st_uid == os.getuid()
        return False


def _require_equal(own: Sequence[Entries], files: Mapping[str, Entry]) -> None:
    """Raise TrainingError unless ranks with copies of a shard have written the same file."""
    for rank, entries in enumerate(own):
        for name, entry in entries.items():
            if Entry(*entry) != files[name]:
                raise TrainingError(
                    f"{name}: rank {rank}'s copy of the shard has other bits than the others; set "
                    "parallel3d.train.check_bits.every to find the wrong one"
                )


def _require_copy(name: str, holders: Sequence[int]) -> None:
    if not holders:
        raise CheckpointError(f"in memory is rejected: no host has an intact copy of {name}")


def _digest(manifest: Manifest) -> str:
    return xxh3_128_hexdigest(manifest_bytes(*manifest))


def _receive(mesh: Mesh, path: Path, entry: Entry, source: int) -> str:
    """Write a file that another rank sends; return what went wrong, or ""."""

    def received() -> Iterator[Any]:
        for at in range(0, entry.size, disk.BLOCK):
            block = torch.empty(min(disk.BLOCK, entry.size - at), dtype=torch.uint8)
            mesh.messages.receive_aside(block, source)
            yield block.numpy()

    blocks = received()
    problem = ""
    try:
        if disk.write_file(path, blocks) != entry:
            problem = f"{path} was damaged on its way from rank {source}"
    except OSError as error:
        problem = f"rank {mesh.rank}: {error.strerror} ({path})"
    for _ in blocks:  # else the sender would wait
        pass
    return problem
