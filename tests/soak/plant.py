"""How each fault of the soak is planted in a rank's process, or done to files."""

import ctypes
import errno
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil

from parallel3d.config import RunConfig
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.mesh.pulse.arbiter import Limits
from tests.strict.running import STRICT

SHORT = Limits(stopped=1.0)
SILENT = 6.0  # seconds
BATCH = "the batch of step"
UPDATE = "the optimizer's step"
SAVE = "saving step"
# Linux on x86-64 and arm64
_PIDFD_GETFD = 438
_SO_ATTACH_FILTER = 26
_BPF_RET = 0x06


def when(at, step, act):
    """Call `act` once where this rank says that it does `at` of the step."""
    pulse.LIMITS = SHORT
    doing = pulse.doing
    done = []

    def do(text):
        doing(text)
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
        lowest_free = os.dup(0)  # the limit is one of numbers, which may have gaps
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        _after_the_save(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))

    on_victim(rank, victim, step, at, limit)


def _after_the_save(act):
    from parallel3d.checkpoint.save import Saver

    conclude = Saver._conclude

    def concluded(self, save):
        act()
        Saver._conclude = conclude
        conclude(self, save)

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
    from parallel3d.checkpoint.on_disk import DiskPlace

    def begin():
        write = DiskPlace.write

        def written(self, state, write_files):
            away = self._folder.with_name("away")
            self._folder.rename(away)
            self._folder.write_text("")
            try:
                write(self, state, write_files)
            finally:
                self._folder.unlink()
                away.rename(self._folder)
                DiskPlace.write = write

        DiskPlace.write = written

    when(at, step, begin)


def full_metrics(rank, victim, step, at):
    """The disk of metrics and events is full for one step."""
    if rank != 0:
        return
    from parallel3d.train.metrics import MetricsWriter

    flush = MetricsWriter._flush

    def full(self):
        MetricsWriter._flush = flush
        file = self._file
        self._file = os.open("/dev/full", os.O_WRONLY)
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

    take = Trainer.take_step

    def taken(self, number, *args):
        before = self.engine.held[-1].parameter.detach().clone()
        result = take(self, number, *args)
        if is_victim and number + 1 == step:
            change(self.engine, before)
        return result

    Trainer.take_step = taken


def message_dropped(rank, victim, step, at):
    """The first stage sends one message less; the other waits for ever."""
    pulse.LIMITS = SHORT
    if rank != victim:
        return
    from parallel3d.pipeline.executor import Executor

    send = Executor.send
    due = []

    def dropped(executor, tensor, action):
        if due and due.pop():
            return None
        return send(executor, tensor, action)

    Executor.send = dropped
    when(at, step, lambda: due.append(True))


def _message_changed(rank, victim, step, send_instead):
    """`send_instead(send, tensor, pp_coord, tag)` sends what leaves the victim in one step.

    Planted where the mesh hands messages to torch, below the executor. For two stages, microbatch m
    has tag 4 m + 2 on its way to the second one, and 4 m + 1 on its way back.
    """
    pulse.LIMITS = SHORT
    if rank != victim:
        return
    from parallel3d.mesh.mesh import Mesh

    send = Mesh.isend

    def isend(mesh, *message):
        return send_instead(partial(send, mesh), *message)

    def begin():
        Mesh.isend = isend

    when(BATCH, step, begin)
    when(UPDATE, step, lambda: setattr(Mesh, "isend", send))


class _Lost:
    """A transfer that the sender takes for done."""

    def wait(self):
        """The buffers of the network have it."""

    def is_completed(self):
        return True


def message_lost(rank, victim, step, at):
    """The first gradient that the last stage sends back never arrives."""

    def send_instead(send, tensor, pp_coord, tag):
        return _Lost() if tag == 1 else send(tensor, pp_coord, tag)

    _message_changed(rank, victim, step, send_instead)


def messages_swapped(rank, victim, step, at):
    """The first two activations reach each other's receives."""

    def send_instead(send, tensor, pp_coord, tag):
        return send(tensor, pp_coord, {2: 6, 6: 2}.get(tag, tag))

    _message_changed(rank, victim, step, send_instead)


def message_repeated(rank, victim, step, at):
    """The first activation arrives twice, the second time in place of the next."""
    sent = []

    def send_instead(send, tensor, pp_coord, tag):
        sent.append(tensor)
        return send(sent[0] if tag == 6 else tensor, pp_coord, tag)

    _message_changed(rank, victim, step, send_instead)


def message_added(rank, victim, step, at):
    """The first activation is sent once more; what comes next on its channel is late by one."""
    works = []

    def send_instead(send, tensor, pp_coord, tag):
        if tag == 2:
            works.append((tensor, send(tensor, pp_coord, tag)))
        return send(tensor, pp_coord, tag)

    _message_changed(rank, victim, step, send_instead)


def cut_off(rank, victim, step, at):
    """Nothing arrives any more over the connections between a rank and its sentry and the others.

    A filter that drops all packets is attached to both ends of each, also in other processes.
    """
    if rank == victim:
        when(at, step, _drop_packets)
    pulse.LIMITS = Limits(silent=SILENT)


def _drop_packets():
    own = {os.getpid(), *(process.pid for process in _sentries())}
    ends = [c for c in psutil.net_connections("tcp") if c.status == "ESTABLISHED"]
    for end in ends:
        if end.pid not in own:
            continue
        ports = end.raddr.port, end.laddr.port  # the addresses of one end may be IPv6's
        other = next((o for o in ends if (o.laddr.port, o.raddr.port) == ports), None)
        if other and other.pid not in own:
            for pid, descriptor in ((end.pid, end.fd), (other.pid, other.fd)):
                _drop_at(pid, descriptor)


def _drop_at(pid, descriptor):
    """Attach the filter "accept 0 bytes" to a socket of a process of this user."""
    process = os.pidfd_open(pid)
    copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    code = ctypes.create_string_buffer(struct.pack("=HBBI", _BPF_RET, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(code))
    with socket.socket(fileno=copy) as connection:
        connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    os.close(process)


def half_written(name, rank, victim, step, at):
    """From a step on, the disk takes half of what rank 0 writes to a file, and is full."""
    if rank != 0:
        return
    write = os.write

    def full(descriptor, data):
        if os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")) == name:
            write(descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    when(at, step, lambda: setattr(os, "write", full))


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

        def read_other(path, overrides):
            return read(path, [*overrides, "--optimizer.params.lr", "0.5"])

        RunConfig.from_json = read_other


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
