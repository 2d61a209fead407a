"""Trackers: what each is called with, and that none of them can end a run."""

import csv
import errno
import resource
import signal
import sys
import time
from contextlib import suppress

import pytest
from deepspeed.monitor.config import CSVConfig
from deepspeed.monitor.csv_monitor import csvMonitor

from parallel3d.config import RunConfig
from parallel3d.train import trackers
from parallel3d.train.trackers import CsvTracker, Trackers, requested_trackers
from parallel3d.verify.local_ranks import run_locally
from tests.config.configs import raw

pytestmark = pytest.mark.gloo


def config_of(**changes):
    return RunConfig.from_dict(raw(**changes)).resolve(4)


class Fake:
    """A tracker's package, of which every call is noted; `broken` names the calls that raise."""

    __version__ = "99.0"

    def __init__(self, broken=(), error=RuntimeError):
        self.calls = []
        self._broken = broken
        self._error = error
        self.config = self

    def _note(self, name, /, *args, **options):
        self.calls.append((name, args, options))
        if name in self._broken:
            raise self._error(f"{name} is down\nmore of it")
        return self

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **options: self._note(name, *args, **options)

    def names(self):
        return [name for name, _, _ in self.calls]

    def options(self, name):
        return next(options for called, _, options in self.calls if called == name)


@pytest.fixture
def installed(monkeypatch):
    """Puts a fake package where it is imported from."""
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR", "COMET_PROJECT_NAME"):
        monkeypatch.delenv(name, raising=False)

    def install(package, **options):
        fake = Fake(**options)
        monkeypatch.setitem(sys.modules, package, fake)
        return fake

    return install


def started(tmp_path, messages=None, step=0, **changes):
    messages = messages if messages is not None else []
    return Trackers(config_of(**changes), tmp_path / "mine", step=step, say=messages.append)


def test_requested_trackers_name_their_settings():
    assert requested_trackers(config_of()) == {}
    assert requested_trackers(config_of(**{"parallel3d.run.tensorboard": True})) == {
        "tensorboard": "parallel3d.run.tensorboard"
    }
    both = config_of(
        **{"parallel3d.run.trackers": ["csv", "wandb"], "wandb": {"enabled": True}},
        tensorboard={"enabled": True},
        comet={"enabled": False, "project": "p"},
        csv_monitor=None,
    )
    assert requested_trackers(both) == {
        "csv": "parallel3d.run.trackers",
        "wandb": "wandb",
        "tensorboard": "tensorboard",
    }


@pytest.mark.parametrize("block", [True, False])
def test_tensorboard_reads_back(tmp_path, block):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    if block:
        place = {"enabled": True, "output_path": str(tmp_path / "boards"), "job_name": "job"}
        asked = {"tensorboard": place}
        folder = tmp_path / "boards" / "job"
    else:
        asked = {"parallel3d.run.trackers": ["tensorboard"]}
        folder = tmp_path / "mine" / "tensorboard"
    for first in (0, 1):  # the second goes on from step 1, of which two were seen
        running = started(tmp_path, step=first, **asked)
        for step in (first + 1, first + 2):
            running.log({"loss": 5.0 - step - first}, step)
        running.finish()
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 4.0), (2, 2.0), (3, 1.0)]


def test_csv_files_are_those_that_deepspeed_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *args: 0)
    place = {"enabled": True, "output_path": str(tmp_path / "ours"), "job_name": "job"}
    ours = started(tmp_path, csv_monitor=place)
    theirs = csvMonitor(CSVConfig(**place | {"output_path": str(tmp_path / "theirs")}))
    for step in (1, 2):
        values = {"loss": 1.5 * step, "lr": 1e-3, "Train/Samples/x": 3}
        ours.log(values, step)
        theirs.write_events([(name, value, step) for name, value in values.items()])
    ours.finish()
    files = sorted((tmp_path / "theirs" / "job").iterdir())
    assert [path.name for path in files] == ["Train_Samples_x.csv", "loss.csv", "lr.csv"]
    for path in files:
        assert (tmp_path / "ours" / "job" / path.name).read_bytes() == path.read_bytes()


def test_wandb_is_called_as_deepspeed_and_as_the_list_mean_it(tmp_path, installed):
    fake = installed("wandb")
    block = {"enabled": True, "group": "g", "team": "t", "project": "p"}
    running = started(tmp_path, wandb=block)
    running.log({"loss": 1.0}, 7)
    running.finish()
    assert fake.names() == ["init", "update", "log", "finish"]
    assert fake.options("init") == {
        "project": "p",
        "group": "g",
        "entity": "t",
        "name": "mine",
        "dir": str(tmp_path / "mine"),
    }
    assert fake.calls[2][1:] == (({"loss": 1.0},), {"step": 7})
    sent = fake.calls[1][1][0]
    assert sent["parallel3d.mesh.pp"] == 2 and sent["optimizer.params.lr"] == 1e-3
    fake = installed("wandb")
    started(tmp_path, **{"parallel3d.run.trackers": ["wandb"]})
    assert fake.options("init")["project"] == "parallel3d"


def test_comet_is_called_as_deepspeed_means_it_and_its_key_is_not_written(tmp_path, installed):
    fake = installed("comet_ml")
    block = {"enabled": True, "project": "p", "api_key": "secret"}
    running = started(tmp_path, comet=block | {"experiment_name": "e", "online": False})
    for step in (1, 2):
        running.log({"loss": float(step)}, step)
    running.finish()
    assert fake.options("start") == {"project_name": "p", "api_key": "secret", "online": False}
    assert ("set_name", ("e",), {}) in fake.calls
    logged = [options["step"] for name, _, options in fake.calls if name == "log_metric"]
    assert logged == [1, 2]
    assert "secret" not in str(config_of(comet=block).to_dict())
    assert "secret" not in str(fake.calls[1:])


ONE = {"loss": 1.0}
TWO = {"loss": 2.0}


@pytest.mark.parametrize("call", ["init", "update", "log", "finish"])
@pytest.mark.parametrize("error", [RuntimeError, SystemExit, OSError])
def test_failing_tracker_is_named_once_and_dropped(tmp_path, installed, call, error):
    fake = installed("wandb", broken=[call], error=error)
    messages = []
    running = started(tmp_path, messages, **{"parallel3d.run.trackers": ["wandb", "csv"]})
    for step in (1, 2, 3):
        running.log(ONE, step)
    running.finish()
    (warning,) = messages
    assert warning.startswith("WARNING: parallel3d.run.trackers: wandb ")
    assert f"{error.__name__}: {call} is down)" in warning and "more of it" not in warning
    assert "set WANDB_MODE=offline" in warning
    assert fake.names().count(call) == 1
    assert len((tmp_path / "mine" / "csv" / "loss.csv").read_text().splitlines()) == 4


def test_missing_package_gives_one_message(tmp_path, monkeypatch):
    messages = []
    for package in ("wandb", "comet_ml", "mlflow"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it raises ImportError
    names = ["wandb", "comet", "mlflow"]
    running = started(tmp_path, messages, **{"parallel3d.run.trackers": names})
    running.log(ONE, 1)
    running.finish()
    assert len(messages) == 3
    for text, package in zip(messages, ("wandb", "comet_ml", "mlflow"), strict=True):
        assert f"pip install {package}, or remove it" in text


def test_unwritable_tracker_folder_gives_one_message_per_tracker(tmp_path):
    (tmp_path / "file").write_text("")
    messages = []
    place = {"enabled": True, "output_path": str(tmp_path / "file")}
    running = started(tmp_path, messages, csv_monitor=place, tensorboard=place)
    running.log(ONE, 1)
    running.finish()
    assert sorted(text.split(":")[1] for text in messages) == [" csv_monitor", " tensorboard"]


def test_full_disk_ends_csv_tracker_until_next_start(tmp_path, monkeypatch):
    messages = []

    def log(self, values, step):
        with open(self._folder / "loss.csv", "a") as file:
            file.write(str(step)[:1])  # no room for the whole row
        raise OSError(errno.ENOSPC, "No space left on device")

    running = started(tmp_path, messages, **{"parallel3d.run.trackers": ["csv"]})
    running.log(ONE, 1)
    with monkeypatch.context() as full:
        full.setattr(CsvTracker, "log", log)
        running.log(TWO, 2)
    running.log(TWO, 3)
    assert len(messages) == 1 and "No space left" in messages[0]
    running = started(tmp_path, step=1, **{"parallel3d.run.trackers": ["csv"]})
    running.log(ONE, 2)
    rows = (tmp_path / "mine" / "csv" / "loss.csv").read_text().split()
    assert rows == ["step,loss", "1,1.0", "2,1.0"]


class Silent(Fake):
    """A package whose server accepts calls and never answers some of them."""

    def _note(self, name, /, *args, **options):
        self.calls.append((name, args, options))
        while name in self._broken:
            with suppress(Exception):  # a library that tries again
                time.sleep(60)
        return self


@pytest.mark.parametrize(
    ("silent", "words"),
    [
        (("init",), "cannot be started and is left out (NoAnswer: nothing for 0 s)"),
        (("log",), "failed at step 1 and is left out"),
        (("log", "finish"), "failed at step 1 and is left out"),
        (("finish",), "could not be closed"),
    ],
    ids=str,
)
def test_tracker_whose_server_is_silent_is_left_out(tmp_path, monkeypatch, silent, words):
    monkeypatch.setattr(trackers, "START_SECONDS", 0.2)
    monkeypatch.setattr(trackers, "LOG_SECONDS", 0.1)
    fake = Silent(broken=silent)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    messages = []
    handler = signal.getsignal(signal.SIGALRM)
    running = started(tmp_path, messages, **{"parallel3d.run.trackers": ["wandb"]})
    running.log({"loss": 1.0}, 1)
    running.finish()
    (message,) = messages
    assert words in message and "run `wandb login`" in message
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


class Panic(BaseException):
    """As libraries in Rust raise."""


def test_tracker_that_raises_no_exception_is_left_out(tmp_path, installed):
    installed("wandb", broken=("init",), error=Panic)
    messages = []
    started(tmp_path, messages, **{"parallel3d.run.trackers": ["wandb"]})
    assert len(messages) == 1 and "Panic: init is down" in messages[0]


def test_csv_rows_of_steps_to_come_are_dropped(tmp_path):
    for first in (0, 2):
        tracker = CsvTracker(tmp_path, first)
        tracker.start()
        for step in range(first + 1, first + 4):
            tracker.log({"loss": 10 * first + step}, step)
    with open(tmp_path / "loss.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [["step", "loss"], ["1", "1"], ["2", "2"], ["3", "23"], ["4", "24"], ["5", "25"]]


def test_csv_file_with_cut_header_is_rewritten(tmp_path):
    (tmp_path / "loss.csv").write_text("step,lo")
    tracker = CsvTracker(tmp_path)
    tracker.start()
    tracker.log({"loss": 1.0}, 1)
    assert (tmp_path / "loss.csv").read_text() == "step,loss\n1,1.0\n"


def test_csv_rows_stay_where_the_disk_is_full_at_the_start(tmp_path, monkeypatch):
    first = CsvTracker(tmp_path)
    first.start()
    for step in (1, 2):
        first.log({"loss": 1.0}, step)
    before = (tmp_path / "loss.csv").read_bytes()

    def sync(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("parallel3d.base.atomic.sync", sync)
    with pytest.raises(OSError, match="No space left"):
        CsvTracker(tmp_path, 1).start()
    assert (tmp_path / "loss.csv").read_bytes() == before
    monkeypatch.undo()
    CsvTracker(tmp_path, 1).start()
    assert (tmp_path / "loss.csv").read_bytes() == b"step,loss\r\n1,1.0\r\n"


def test_full_disk_of_tensorboard_gives_one_message(tmp_path):
    [(line,)] = run_locally(log_to_a_full_disk, 1, tmp_path)
    assert "tensorboard failed at step" in line and "File too large" in line


def log_to_a_full_disk(rank, folder):
    """What the trackers say."""
    words = ["--parallel3d.run.tensorboard", "true", "--mesh.dp", "1"]
    config = RunConfig.from_json("ds.json", words).resolve(1)
    messages = []
    own = Trackers(config, folder, step=0, say=messages.append)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
    for step in range(1, 60):
        own.log({"loss": 1.0}, step)
        if not messages:
            time.sleep(0.1)
    own.finish()
    return messages


def test_every_name_of_the_list_is_a_tracker(tmp_path, monkeypatch):
    """Each is made with arguments that accelerate's class takes; none is started."""
    from accelerate import tracking

    made = []
    for name, cls in list(tracking.LOGGER_TYPE_TO_CLASS.items()):
        ours = "comet" if name == "comet_ml" else name
        tracker = trackers.make(ours, config_of(), tmp_path, 0)
        assert isinstance(tracker, cls) and tracker.main_process_only is False
        made.append(ours)
    allowed = RunConfig.from_dict(raw(**{"parallel3d.run.trackers": [*made, "csv"]}))
    assert len(allowed.run.trackers) == len(made) + 1
