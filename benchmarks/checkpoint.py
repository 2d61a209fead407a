"""Checkpoints against torch.distributed.checkpoint and DeepSpeed's own, as ratios in one run.

    python benchmarks/checkpoint.py [--ranks 2 --zero 3 --hidden 768 --layers 8 --rounds 7 --json]

One engine on the same ranks is saved and loaded by all of them in turns, on the same disk. A save
lasts until everything is *durable*: each file and each folder's entries synced, on all ranks.
torch and DeepSpeed leave some of that out, so it is done for them, and counted. A load begins with
a cold page cache and must bring back every master and moment, bit by bit. Before the rounds that
are timed comes one in which memory is sampled. Each number is the slowest (largest) rank's, each
ratio one of medians, to the faster of the others.
"""

import argparse
import ctypes
import gc
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from contenders import Contender, DeepSpeed, Ours, Torch, digest_of, trained, wipe
from rich.filesize import decimal

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.engine import Engine
from parallel3d.extras.calibrate.steps import SmallRun
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.local_ranks import free_port

TIMES = ("save", "stall", "memcpy", "load", "load verified")
_SECONDS = "{:.2f} s".format
OURS = "ours"
UNHASHED = "ours, not hashed"
BEHIND = "ours, asynchronous"
COLUMNS = {
    "bytes": decimal,
    "save": _SECONDS,
    "save least": _SECONDS,
    "save cpu": _SECONDS,
    "save memory": decimal,
    "load": _SECONDS,
    "load least": _SECONDS,
    "load cpu": _SECONDS,
    "load verified": _SECONDS,
    "load memory": decimal,
}
Numbers = dict[str, dict[str, list[float]]]  # contender -> what was measured -> every round's
Work = Callable[[], object]


class Bench:
    """Measures one contender after the other; `numbers` is what was found."""

    def __init__(self, mesh: Mesh, engine: Engine) -> None:
        self.mesh = mesh
        self.engine = engine
        self.numbers: Numbers = defaultdict(lambda: defaultdict(list))
        self._digest = digest_of(engine)
        shard = sum(piece.numel for block in engine.states.blocks for piece in block)
        self._from, self._to = (torch.ones(3 * shard) for _ in range(2))
        self._step = 0

    def round(self, rivals: dict[str, Contender], sampled: bool) -> None:
        """A turn for each: saved, loaded, deleted; the first one changes from round to round."""
        self._step += 1
        names = list(rivals)
        first = self._step % len(names)
        for name in names[first:] + names[:first]:
            self._turn(name, rivals[name], sampled)

    def _turn(self, name: str, rival: Contender, sampled: bool) -> None:
        step = self._step
        measure = self._sampled if sampled else self._timed
        if sampled:
            measure(name, "save", partial(_save_and_wait, rival, step))
        elif rival.stalls:
            measure(name, "memcpy", lambda: self._to.copy_(self._from))
            measure(name, "stall", lambda: rival.save(step))
            self._note(name, "save", rival.wait())
        else:
            measure(name, "save", lambda: rival.save(step))
        files = [path for path in rival.folder.rglob("*") if path.is_file()]
        self._note(name, "bytes", sum(path.stat().st_size for path in files))
        for way, load in rival.loads.items():
            self._forget(files)
            wipe(self.engine)
            measure(name, way, partial(load, step))
            assert digest_of(self.engine) == self._digest, f"{name} brought other numbers"
        self.mesh.barrier()
        if self.mesh.rank == 0:
            for path in rival.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()

    def _timed(self, name: str, what: str, work: Work) -> None:
        self._tidy()
        start = time.perf_counter()
        cpu = time.process_time()
        work()
        self._note(name, what, time.perf_counter() - start)
        self._note(name, f"{what} cpu", time.process_time() - cpu)

    def _sampled(self, name: str, what: str, work: Work) -> None:
        self._tidy()
        done = threading.Event()
        before = _anonymous_bytes()
        most = [before]

        def watch() -> None:
            while not done.wait(1e-3):
                most[0] = max(most[0], _anonymous_bytes())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            work()
            most[0] = max(most[0], _anonymous_bytes())
        finally:
            done.set()
            thread.join()
        self._note(name, f"{what} memory", most[0] - before)

    def _tidy(self) -> None:
        """Leave no turn anything to find or to pay for that the one before it left."""
        gc.collect()
        # Free memory, of which a virtual machine's host may have taken some back.
        torch.ones(2 * len(self._from))
        ctypes.CDLL(None).malloc_trim(0)
        self.mesh.barrier()

    def _note(self, name: str, what: str, number: float) -> None:
        """The largest of all ranks' numbers."""
        largest = max(row[0] for row in self.mesh.messages.gather_floats([number]))
        self.numbers[name][what].append(largest)

    def _forget(self, files: list[Path]) -> None:
        """Have the files out of the page cache."""
        self.mesh.barrier()
        if self.mesh.rank == 0:
            for path in files:
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def _save_and_wait(rival: Contender, step: int) -> None:
    rival.save(step)
    rival.wait()


def _anonymous_bytes() -> int:
    """This process's memory that no file is behind: what it has allocated and touched."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def on_rank(rank: int, args: argparse.Namespace, folder: Path) -> None:
    """What one rank does; rank 0 prints."""
    with redirect_stdout(sys.stderr):  # DeepSpeed talks
        mesh = Mesh(dp=args.ranks, launch=Launch(rank, args.ranks, rank, args.ranks))
        torch.serialization.set_crc32_options(args.crc32)
        run = SmallRun(
            MeshSizes(dp=args.ranks),
            args.zero,
            args.hidden,
            args.layers,
            micro=1,
            microbatches=1,
            seq=16,
            vocab=args.vocab,
            offload=args.offload,
            precision=args.precision,
        )
        engine, layers = trained(mesh, run)
        rivals: dict[str, Contender] = {
            OURS: Ours(engine, mesh, folder / "ours", layers),
            UNHASHED: Ours(engine, mesh, folder / "unhashed", layers, hashed=False),
            BEHIND: Ours(engine, mesh, folder / "behind", layers, asynchronous=True),
            "DCP, parameters": Torch(engine, mesh, folder / "dcp", False, args.threads),
            "DCP, flat groups": Torch(engine, mesh, folder / "flat", True, args.threads),
            "DeepSpeed": DeepSpeed(engine, mesh, folder / "deepspeed"),
        }
        bench = Bench(mesh, engine)
        bench.round(rivals, sampled=True)
        for _ in range(args.rounds):
            bench.round(rivals, sampled=False)
    if mesh.rank == 0:
        params = sum(layer.num_params for layer in layers)
        found = {name: summed_up(bench.numbers[name]) for name in rivals}
        options = {k: v for k, v in vars(args).items() if k not in ("folder", "json")}
        report = {
            **options,
            "torch": torch.__version__,
            "parameters": params,
            "state_bytes": 12 * params,
            "contenders": found,
            "ratios": ratios(found),
        }
        print(json.dumps(report) if args.json else table(report))
    mesh.barrier()
    engine.close()
    mesh.close()


def summed_up(found: dict[str, list[float]]) -> dict[str, float]:
    """The median of each, and of the times also the least."""
    medians = {what: statistics.median(values) for what, values in found.items()}
    return medians | {f"{what} least": min(found[what]) for what in TIMES if what in found}


def ratios(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """What the targets are about."""
    others = [name for name in found if name not in (OURS, UNHASHED, BEHIND)]
    save = min(found[name]["save"] for name in others)
    load = min(found[name]["load"] for name in others)
    ours = found[OURS]
    unhashed = found[UNHASHED]
    behind = found[BEHIND]
    return {
        "save hashed": ours["save"] / save,
        "save not hashed": unhashed["save"] / save,
        "stall to memcpy": behind["stall"] / behind["memcpy"],
        "load": ours["load"] / load,
        "load verified": ours["load verified"] / load,
    }


def table(report: dict[str, Any]) -> str:
    """The report as people read it."""
    found = report["contenders"]
    rows = []
    for name, numbers in found.items():
        cells = [show(numbers[what]) if what in numbers else "" for what, show in COLUMNS.items()]
        rows.append([name, *cells])
    rows.insert(0, ["", *COLUMNS])
    behind = found[BEHIND]
    return "\n".join(
        [
            f"{report['parameters'] / 1e6:.1f} M parameters, {decimal(report['state_bytes'])} of "
            f"masters and moments; {report['ranks']} ranks, ZeRO-{report['zero']}, "
            f"{report['precision']}; {report['rounds']} rounds; torch {report['torch']}, "
            f"{os.cpu_count()} cores",
            *(f"{row[0]:20}" + "".join(f"{cell:>14}" for cell in row[1:]) for row in rows),
            f"stall {1e3 * behind['stall']:.0f} ms, memcpy {1e3 * behind['memcpy']:.0f} ms",
            *(f"{what:20}{ratio:6.2f} x" for what, ratio in report["ratios"].items()),
        ]
    )


def main() -> None:
    """Start the ranks, and delete what they wrote."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in [
        ("ranks", 2),
        ("hidden", 768),
        ("layers", 8),
        ("vocab", 32768),
        ("rounds", 7),
        ("threads", 1),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--zero", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--offload", default="none", choices=("none", "cpu"))
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument(
        "--crc32", action="store_true", help="have torch.save compute checksums, its default"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=args.folder))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ranks = mp.spawn(on_rank, (args, folder), args.ranks, join=False)
    try:
        while not ranks.join():
            pass
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
