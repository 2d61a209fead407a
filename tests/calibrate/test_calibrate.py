"""Calibration: what a machine is measured to be is what a file says, or nothing is written."""

import json
import math
from dataclasses import asdict
from datetime import date

import pytest

from parallel3d.base.errors import TrainingError
from parallel3d.config.hardware import Hardware, load
from parallel3d.extras.calibrate import describe as calibration
from parallel3d.extras.calibrate.describe import fit, fit_link
from parallel3d.extras.calibrate.measure_device import Effort
from parallel3d.extras.calibrate.steps import Timed, small_runs
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.operators import Curves
from parallel3d.plan.time.step import step_time

pytestmark = pytest.mark.gloo

LATENCY = 2e-4
BANDWIDTH = 1.5e9
QUICK = Effort(0.002, 0.005, 128, 50_000, 2**20, 1, 2)  # enough to see that everything works
SIZES = [4096 * 4**i for i in range(8)]


def figures_of(value, place=""):
    """Every {"value", "source"} in a JSON object, with its place."""
    if isinstance(value, dict) and "value" in value:
        yield place, value["value"], value["source"]
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from figures_of(inner, f"{place}.{name}")


def planted(ranks, speed=1e11):
    """Return what `ranks` measure on a machine of planted figures."""
    measured = {
        "device_name": "",
        "memory_bytes": 8e9,
        "bandwidth": 2e10,
        "adam_params": 2e8,
        "host_adam_params": 5e8,
        "host_copy": 1e10,
    }
    shapes = [(s, s, s) for s in (64, 128, 256, 512, 1024)] + [(128, 1024, 64), (512, 64, 2048)]
    measured["matmul"] = {"fp32": [(m, k, n, 1e-5 + 2 * m * k * n / speed) for m, k, n in shapes]}
    flops = [4 * 2 * 4 * s * s * 64 for s in (64, 128, 256, 512)]
    measured["attention"] = [
        (2, 4, s, 64, f / 2e11, f / 8e10) for s, f in zip((64, 128, 256, 512), flops, strict=True)
    ]
    measured["traffic"] = [("add", 2**k, 2**k / 1e10) for k in range(16, 24)]
    once = [(n, LATENCY + n / 2 / BANDWIDTH) for n in SIZES]
    rows = {
        "all_reduce": [(n, 2 * seconds) for n, seconds in once],
        "all_gather": once,
        "reduce_scatter": once,
        "send": [(n, LATENCY + n / BANDWIDTH) for n in SIZES],
    }
    return [measured | {"links": rows if ranks > 1 else {}} for _ in range(ranks)]


@pytest.fixture
def machine(monkeypatch):
    """A machine of two processes on which measuring takes no time."""
    plant(monkeypatch)
    return monkeypatch


def plant(monkeypatch):
    monkeypatch.setattr(calibration, "_devices", lambda: (False, 2))
    monkeypatch.setattr(calibration, "_measure", lambda ranks, effort: planted(ranks))
    few = small_runs(2)[::3]  # the fit's time grows with their number
    runs = [(run, Timed(0.05 * (1 + run.layers) * run.mesh.ranks, 0.01)) for run in few]
    monkeypatch.setattr(calibration, "_steps", lambda ranks, effort: runs)


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """The hardware of such a machine, the folder of its file, and the messages."""
    folder = tmp_path_factory.mktemp("planted")
    messages = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch)
        hardware = calibration.calibrate(messages.append, folder / "this-machine.json")
    return hardware, folder, messages


def test_link_is_fitted_to_timings_of_all_collectives():
    # A ring of two: each sends half of the bytes once, or twice in an all-reduce.
    bandwidth, latency = fit_link(planted(2)[0]["links"], ranks=2)
    assert bandwidth == pytest.approx(BANDWIDTH, rel=0.01)
    assert latency == pytest.approx(LATENCY, rel=0.02)


def test_fit_recovers_parameters_and_keeps_undetermined_ones():
    sizes = (1.0, 2.0, 5.0, 10.0)
    fitted = fit(
        {"slope": 1.0, "offset": 1.0, "unseen": 7.0, "fixed": 3.0},
        {"slope": (1e-3, 1e3), "offset": (1e-3, 1e3), "unseen": (1e-3, 1e3)},
        lambda v: [v["slope"] * x + v["offset"] for x in sizes],
        [4 * x + 0.5 for x in sizes],
    )
    assert fitted["slope"] == pytest.approx(4, rel=0.05)
    assert fitted["offset"] == pytest.approx(0.5, rel=0.2)
    assert fitted["unseen"] == pytest.approx(7)
    assert fitted["fixed"] == 3.0
    bounded = fit({"slope": 1.0}, {"slope": (0.5, 2.0)}, lambda v: [v["slope"]], [100.0])
    assert bounded["slope"] == pytest.approx(2.0)


def test_planted_machine_is_described(described):
    hardware, folder, messages = described
    path = folder / "this-machine.json"
    assert Hardware.model_validate(json.loads(path.read_text())) == hardware
    assert [p.name for p in folder.iterdir()] == [path.name]
    assert str(path) in messages[-1]
    assert hardware.matmul_flops["fp32"].value == pytest.approx(1e11, rel=0.01)
    assert hardware.memory_bandwidth.value == 2e10
    assert hardware.memory_bytes.value == 8e9
    assert hardware.host.device_bandwidth.value == 1e10
    assert hardware.host.adam_params.value == 5e8
    assert hardware.link.bandwidth.value == pytest.approx(BANDWIDTH, rel=0.01)
    assert hardware.cores.count.value == 2
    assert hardware.cores.alone["matmul"].value == pytest.approx(1)
    assert set(hardware.curves) == set(asdict(Curves()))
    for place, value, source in figures_of(json.loads(path.read_text())):
        assert value > 0, place
        assert f"measured on {date.today()}" in source, place


def test_processes_on_one_core_take_turns(described):
    hardware, *_ = described
    assert hardware.slowdown("matmul", 4) == 2
    assert hardware.slowdown("matmul", 2) == 1
    assert hardware.slowdown("overhead", 1) == hardware.cores.alone["overhead"].value
    assert hardware.model_copy(update={"cores": None}).slowdown("matmul", 4) == 1


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_small_runs_fit_any_number_of_processes(ranks):
    runs = small_runs(ranks)
    assert {run.mesh.ranks for run in runs} == {1, ranks}
    assert len(set(runs)) == len(runs)
    for run in runs:
        assert run.config().mesh.dp == run.mesh[1]
        assert Setting.from_config(run.config()).mesh.ranks == run.mesh.ranks


@pytest.mark.parametrize(
    "broken", [{"bandwidth": 0.0}, {"host_copy": math.inf}, {"traffic": [("add", 64, -1.0)]}]
)
def test_impossible_measurement_writes_nothing(machine, tmp_path, broken):
    machine.setattr(
        calibration, "_measure", lambda ranks, effort: [m | broken for m in planted(ranks)]
    )
    path = tmp_path / "this-machine.json"
    path.write_text("as it was")
    with pytest.raises(TrainingError, match=f"{next(iter(broken))} was measured as .*nothing is"):
        calibration.calibrate(lambda text: None, path)
    assert path.read_text() == "as it was"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_hardware_file_is_written_to_the_user_folder(machine, described, tmp_path, monkeypatch):
    hardware, *_ = described
    fitted = Curves(**hardware.curves), hardware
    monkeypatch.setattr(calibration, "fit_program", lambda *args: fitted)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    calibration.calibrate(lambda text: None)
    assert (tmp_path / "config/parallel3d/hardware/this-machine.json").is_file()
    assert load("this-machine").name == "this-machine"
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "a file"))
    with pytest.raises(TrainingError, match=r"cannot write .*; set XDG_CONFIG_HOME to a writable"):
        calibration.calibrate(lambda text: None)


@pytest.mark.usefixtures("cpu_adam")
def test_this_machine_is_measured(tmp_path):
    path = tmp_path / "this-machine.json"
    hardware = calibration.calibrate(lambda text: None, path, QUICK)
    written = Hardware.model_validate(json.loads(path.read_text()))
    assert written == hardware
    assert written.name == "this-machine"
    assert {"fp32", "bf16"} <= set(written.matmul_flops)
    figures = list(figures_of(json.loads(path.read_text())))
    assert len(figures) > 12
    assert all(value > 0 and source.startswith("measured on ") for _, value, source in figures)
    setting = Setting.from_config(small_runs(2)[0].config())
    assert step_time(setting, written, Curves(**written.curves)).seconds > 0
