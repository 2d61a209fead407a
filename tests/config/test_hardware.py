"""Hardware descriptions: sourced figures, found by the driver's name."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.base.section import Section
from parallel3d.config import RunConfig, hardware
from parallel3d.config.hardware import Figure
from tests.config.configs import raw

pytestmark = pytest.mark.pure

DESCRIBED = [name for name in hardware.names() if name != hardware.THIS_MACHINE]


def figures(section: Section) -> Iterator[Figure]:
    """All numbers of a description."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        for entry in value.values() if isinstance(value, Mapping) else (value,):
            if isinstance(entry, Figure):
                yield entry
            elif isinstance(entry, Section):
                yield from figures(entry)


@pytest.mark.parametrize("name", DESCRIBED)
def test_figures_have_sources(name: str) -> None:
    described = hardware.load(name)
    assert described.name == name
    assert all(len(figure.source) > 5 and figure.value > 0 for figure in figures(described))
    assert 1e14 < described.peak_flops[next(iter(described.peak_flops))].value < 1e16
    assert 1e10 < described.memory_bytes.value < 1e12


@pytest.mark.parametrize("name", DESCRIBED)
def test_figures_for_planning_are_plausible(name: str) -> None:
    h = hardware.load(name)
    assert h.memory_bandwidth and h.link and h.network and h.host and h.devices_per_node
    for dtype, measured in h.matmul_flops.items():
        peak = h.peak(dtype)
        assert peak and 0.5 * peak < measured.value < peak  # MI300X reaches 51 %
    # Memory is faster than the links in a node, and these than what leaves it.
    link = h.link.bandwidth.value
    network = h.network.bandwidth.value
    assert h.memory_bandwidth.value > 2 * link > 4 * network
    assert h.link.latency.value < h.network.latency.value < 1e-4
    assert h.devices_per_node.value in (4, 8, 16, 72)
    assert 1e9 < h.host.device_bandwidth.value <= link  # equal where cards meet in the host


def test_aliases_are_unique() -> None:
    aliases = [alias for name in DESCRIBED for alias in hardware.load(name).aliases]
    assert len(aliases) == len(set(aliases))
    assert all(alias == alias.lower() for alias in aliases)
    for gpu in ("v100", "a100", "a100-40gb", "h100", "h200", "b200", "gb200", "gb300", "mi300x"):
        assert gpu in aliases
    for name in ("a100-80gb", "A100-80GB", "a100-sxm4-80gb", "A100"):
        assert hardware.load(name).name == "A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("A100 80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80 GB SXM", "A100-SXM4-80GB"),
        ("a100_40g", "A100-SXM4-40GB"),
        ("A100-SXM-40GiB", "A100-SXM4-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("H100 SXM", "H100-SXM5-80GB"),
        ("GeForce RTX 4090", "RTX4090-24GB"),
        ("RTX 4090 24 GB", "RTX4090-24GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
    ],
)
def test_name_is_understood_as_people_and_drivers_spell_it(name, file) -> None:
    assert hardware.load(name).name == file


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("A100 SXM4", "may be A100-SXM4-40GB or A100-SXM4-80GB; use one of"),
        ("V100 SXM2", "may be V100-SXM2-16GB or V100-SXM2-32GB; use one of"),
        ("80 GB", "may be A100-SXM4-80GB or H100-SXM5-80GB; use one of"),
        ("A100 PCIe 80GB", "is not described"),
        ("H100 NVL", "is not described"),
        ("MI300", "is not described"),
        ("NVIDIA", "is not described"),
        ("A100 96GB", "is not described"),
    ],
)
def test_name_of_several_or_of_none_is_refused(name, message) -> None:
    with pytest.raises(ConfigError, match=message):
        hardware.load(name)


def test_this_machine_must_be_measured_first(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(hardware, "DIRECTORY", tmp_path)
    with pytest.raises(ConfigError, match=r"`parallel3d plan --calibrate` first"):
        hardware.load("this-machine")


@pytest.fixture
def user_folder(monkeypatch, tmp_path):
    """The user's own folder, with nothing in it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "parallel3d" / "hardware"
    folder.mkdir(parents=True)
    return folder


def test_user_folder_is_read_beside_the_shipped_one(user_folder, monkeypatch) -> None:
    shipped = hardware.DIRECTORY / "V100-SXM2-32GB.json"
    description = json.loads(shipped.read_text()) | {"name": "mine", "aliases": []}
    (user_folder / "mine.json").write_text(json.dumps(description))
    assert set(hardware.names()) == {*DESCRIBED, "mine"} | {
        path.stem for path in hardware.DIRECTORY.glob("this-machine.json")
    }
    assert hardware.load("MINE").name == "mine"
    # Of two with one name the user's: a checkout's calibration may be years old.
    description["memory_bytes"] = {"value": 1e9, "source": "the test's own"}
    (user_folder / shipped.name).write_text(json.dumps(description))
    assert hardware.load("V100-SXM2-32GB").memory_bytes.value == 1e9
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")  # which the standard says is none
    assert hardware.user_folder().is_relative_to(Path.home() / ".config")


def test_peak_depends_on_device_and_dtype():
    assert hardware.load("H100-SXM5-80GB").peak("bf16") == 989e12
    assert hardware.load("V100-SXM2-32GB").peak("bf16") is None


def test_device_is_recognised_by_its_driver_name():
    device = hardware.recognise("NVIDIA A100-SXM4-80GB")
    assert device and device.name == "A100-SXM4-80GB"
    assert hardware.recognise("cpu") is None


def test_unknown_device_is_refused():
    with pytest.raises(ConfigError, match=r'"abacus": is not described; .*H100-SXM5-80GB'):
        hardware.load("abacus")


PLAIN = {
    "peak_flops": {"bf16": "1000T"},
    "memory_bytes": "96GB",
    "memory_bandwidth": 4e12,
    "devices_per_node": 8,
    "link": {"bandwidth": {"value": 450e9, "source": "its data sheet"}, "latency": 3e-6},
}


def test_plain_numbers_need_no_source(tmp_path, monkeypatch):
    monkeypatch.setenv("MINE", str(tmp_path))
    (tmp_path / "mine.json").write_text(json.dumps(PLAIN))
    mine = hardware.load("$MINE/mine.json")
    assert (mine.name, mine.memory_bytes.value, mine.peak("bf16")) == ("mine", 96e9, 1e15)
    assert mine.link and mine.link.bandwidth.source == "its data sheet"
    assert mine.link.latency.value == 3e-6 and mine.link.latency.source == ""
    config = raw(**{"parallel3d.run.hardware": str(tmp_path / "mine.json")})
    assert RunConfig.from_dict(config).run.hardware.endswith("mine.json")


@pytest.mark.parametrize("number", [True, [1], "much", 0, -1, "1.5"])
def test_wrong_number_is_one_problem(tmp_path, number):
    (tmp_path / "mine.json").write_text(json.dumps(PLAIN | {"devices_per_node": number}))
    with pytest.raises(ConfigError, match=r"1 problem in .*\n  devices_per_node"):
        hardware.load(str(tmp_path / "mine.json"))


def test_one_function_resolves_each_name():
    """The setting takes what the option takes: names, aliases, and paths."""
    for name in ("A100-SXM4-80GB", "a100-80gb", "h100"):
        assert RunConfig.from_dict(raw(**{"parallel3d.run.hardware": name})).run.hardware == name
    with pytest.raises(ConfigError, match=r'run.hardware = "nowhere/h.json": is not a file'):
        hardware.load("nowhere/h.json")
    # The config of a run is read on machines that do not have the file.
    config = RunConfig.from_dict(raw(**{"parallel3d.run.hardware": "~/nowhere/h.json"}))
    assert config.run.hardware == str(Path.home() / "nowhere/h.json")
