"""How each fault of the soak is planted in a rank's process, or done to files."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from parallel3d.config import RunConfig
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.mesh.pulse.arbiter import Limits
from tests.strict.running import STRICT

SHORT = Limits(stopped=1.0)


def when(at, step, act):
    """Call `act` once where this rank says that it does `at` of the step."""
    pulse.LIMITS, doing, done = SHORT, pulse.doing, []

    def do(text, waits=False):
        doing(text, waits)
        if text == f"{at} {step}" and not done:
            done.append(text)
            act()

    pulse.doing = do


def on_victim(rank, victim, step, at, act):
    pulse.LIMITS = SHORT
    if rank == victim:
        when(at, step, act)


def _kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def _sentries():
    return [p for p in psutil.Process().children() if "sentry" in " ".join(p.cmdline())]


def _kill_sentry():
    for process in _sentries():
        process.kill()


def _pause():
    """Stopped by another process for half a second."""
    text = f"import os,signal,time; time.sleep(0.5); os.kill({os.getpid()}, signal.SIGCONT)"
    subprocess.Popen([sys.executable, "-S", "-c", text])
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise():
    raise ZeroDivisionError("planted")


def killed(rank, victim, step, at):
    on_victim(rank, victim, step, at, _kill_self)


def host_lost(rank, victim, step, at):
    """All processes of the only host."""
    when(at, step, lambda: (_kill_sentry(), _kill_self()))


def both_lost(rank, victim, step, at):
    on_victim(rank, victim, step, at, lambda: (_kill_sentry(), _kill_self()))


def sentry_lost(rank, victim, step, at):
    on_victim(rank, victim, step, at, _kill_sentry)


def stopped(rank, victim, step, at):
    on_victim(rank, victim, step, at, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def delayed(rank, victim, step, at):
    on_victim(rank, victim, step, at, lambda: time.sleep(0.7))


def paused(rank, victim, step, at):
    on_victim(rank, victim, step, at, _pause)
    pulse.LIMITS = Limits()


def late(rank, victim, step, at):
    on_victim(rank, victim, step, at, lambda: time.sleep(1000))


def raising(rank, victim, step, at):
    on_victim(rank, victim, step, at, _raise)


def memory_gone(rank, victim, step, at):
    """No further address space: torch and Python fail to allocate."""

    def limit():
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
        bytearray(2**30)

    on_victim(rank, victim, step, at, limit)


def files_gone(rank, victim, step, at):
    """No further open file for one save."""

    def limit():
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
        _after_the_save(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))

    on_victim(rank, victim, step, at, limit)


def _after_the_save(act):
    from parallel3d.checkpoint.save import Saver

    conclude = Saver._conclude

    def concluded(self):
        act()
        Saver._conclude = conclude
        conclude(self)

    Saver._conclude = concluded


def failing_disk(number, point, rank, victim, step, at):
    """An error of the file system at a save's writes of one step on one rank."""
    from parallel3d.checkpoint import disk

    def fail():
        fault_point = disk.fault_point

        def failed(name):
            fault_point(name)
            if name == f"checkpoint.{point}":
                raise OSError(number, os.strerror(number))

        disk.fault_point = failed
        _after_the_save(lambda: setattr(disk, "fault_point", fault_point))

    on_victim(rank, victim, step, at, fail)


def folder_gone(rank, victim, step, at):
    """The folder of checkpoints is away during a save, as a lost mount is."""
    if rank != 0:
        return
    from parallel3d.checkpoint.save import Saver

    def begin():
        write = Saver._write_all

        def written(self, state, arrays):
            away = self._folder.with_name("away")
            self._folder.rename(away)
            self._folder.write_text("")
            try:
                write(self, state, arrays)
            finally:
                self._folder.unlink()
                away.rename(self._folder)
                Saver._write_all = write

        Saver._write_all = written

    when(at, step, begin)


def full_metrics(rank, victim, step, at):
    """The disk of metrics and events is full for one step."""
    if rank != 0:
        return
    from parallel3d.train.metrics import MetricsWriter

    flush = MetricsWriter._flush

    def full(self):
        MetricsWriter._flush = flush
        file, self._file = self._file, os.open("/dev/full", os.O_WRONLY)
        try:
            flush(self)
        finally:
            os.close(self._file)
            self._file = file

    when(at, step, lambda: setattr(MetricsWriter, "_flush", full))


def clock_jump(seconds, rank, victim, step, at):
    now = time.time
    on_victim(rank, victim, step, at, lambda: setattr(time, "time", lambda: now() + seconds))


def weight_flipped(rank, victim, step, at):
    """A bit of a weight of one replica is flipped once the step is taken."""
    pulse.LIMITS = SHORT

    def flip(engine, before):
        import torch

        engine.held[-1].parameter.data.view(torch.int32).view(-1)[0] ^= 1 << (step % 32 - 1) % 31

    _after_step(rank == victim, step, flip)


def weight_stale(rank, victim, step, at):
    """One replica misses an update of a weight."""
    pulse.LIMITS = SHORT

    def restore(engine, before):
        engine.held[-1].parameter.data.copy_(before)

    _after_step(rank == victim, step, restore)


def _after_step(is_victim, step, change):
    from parallel3d.train.trainer import Trainer

    take = Trainer._step

    def taken(self, number, *args):
        before = self.engine.held[-1].parameter.detach().clone()
        result = take(self, number, *args)
        if is_victim and number + 1 == step:
            change(self.engine, before)
        return result

    Trainer._step = taken


def message_dropped(rank, victim, step, at):
    """The first stage sends one message less; the other waits for ever."""
    pulse.LIMITS = SHORT
    if rank != victim:
        return
    from parallel3d.pipeline.executor import Executor

    send, due = Executor._send, []

    def dropped(executor, tensor, action):
        if due and due.pop():
            return None
        return send(executor, tensor, action)

    Executor._send = dropped
    when(at, step, lambda: due.append(True))


def collective_of_one(rank, victim, step, at):
    """One rank calls a collective that no other calls; a GPU's rules notice it, gloo waits."""
    import torch
    import torch.distributed as dist

    os.environ["PARALLEL3D_BACKEND"] = STRICT
    on_victim(rank, victim, step, at, lambda: dist.all_reduce(torch.ones(3)))


def other_config(rank, victim, step, at):
    """One rank reads another learning rate from its copy of the config."""
    if rank == victim:
        read = RunConfig.from_json
        RunConfig.from_json = lambda path, more: read(path, [*more, "--optimizer.params.lr", "0.5"])


def flip_in(names, folder, draw):
    """Flip a bit of a file; return its name."""
    name = draw.choice([p.name for p in sorted(folder.glob(names))])
    data = bytearray((folder / name).read_bytes())
    # The last bytes of a tensor file are elements, its first are the header.
    low, high = (len(data) // 2, len(data)) if names.startswith("shard") else (0, len(data))
    data[draw.randrange(low, high)] ^= 1 << draw.randrange(8)
    (folder / name).write_bytes(data)
    return name


def truncated(folder, draw):
    path = draw.choice([p for p in sorted(folder.iterdir()) if p.is_file()])
    os.truncate(path, draw.randrange(path.stat().st_size))
    return path.name


def missing(folder, draw):
    path = draw.choice([p for p in sorted(folder.iterdir()) if p.is_file()])
    path.unlink()
    return path.name


def unreadable(folder, draw):
    """A file that cannot be read: a folder stands in its place (EISDIR)."""
    path = draw.choice([p for p in sorted(folder.iterdir()) if p.is_file()])
    path.unlink()
    path.mkdir()
    return path.name


def corpus_flipped(folder, draw):
    """A bit of a token in the cache of the corpus."""
    [path] = Path(os.environ["SOAK_CACHE"]).glob("corpora/*/tokens.bin")
    data = bytearray(path.read_bytes())
    # A low bit, so that the token stays in the vocabulary; the corpus is small: most is trained on.
    data[2 * draw.randrange(len(data) // 4)] ^= 1
    path.write_bytes(data)
    return path.name
