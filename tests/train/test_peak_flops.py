"""What MFU is measured against: the published peak of the type that is trained in, or a matmul."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

from parallel3d.config import RunConfig, hardware
from parallel3d.train import known_hardware, start
from tests.config.configs import raw

pytestmark = pytest.mark.gloo

V100 = "V100-SXM2-32GB"
MESH = SimpleNamespace(
    device=torch.device("cpu"),
    barrier=lambda: None,
    messages=SimpleNamespace(gather_floats=lambda row: [row, [2.0]]),
)


def config_in(name, **changes):
    enabled = {} if name == "fp32" else {f"{name}.enabled": True}
    return RunConfig.from_dict(raw(**enabled, **changes)).resolve(4)


@pytest.mark.parametrize(("name", "chip"), [("bf16", "A100-SXM4-80GB"), ("fp16", V100)])
def test_published_peak_is_that_of_dtype(name, chip):
    config = config_in(name, **{"parallel3d.run.hardware": chip})
    published = hardware.load(chip).peak(name)
    assert published and known_hardware.peak(config, MESH) == (f"{chip}'s {name} peak", published)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_peak_without_publication_is_measured_in_dtype(name, monkeypatch):
    measured = []

    def measure(device, dtype):
        measured.append(dtype)
        return 4.0

    monkeypatch.setattr(known_hardware, "measure_peak_flops", measure)
    assert known_hardware.peak(config_in(name), MESH) == ("a measured matmul", 3.0)
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert measured == [types[name]]


def test_no_peak_of_fp32_is_that_of_tf32():
    """On a device with TF32, a share of fp32's peak would be a share of something else."""
    config = config_in("fp32", **{"parallel3d.train.tf32": True, "parallel3d.run.hardware": V100})
    described = deepcopy(hardware.load(V100))
    described.peak_flops["fp32"] = described.peak_flops["fp16"]
    gpu = SimpleNamespace(**vars(MESH) | {"device": torch.device("cuda")})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_hardware, "known_hardware", lambda config, device: described)
        patch.setattr(known_hardware, "measure_peak_flops", lambda device, dtype: 4.0)
        assert known_hardware.peak(config, gpu) == ("a measured matmul", 3.0)
        assert known_hardware.peak(config, MESH)[0] == f"{described.name}'s fp32 peak"


def test_matmul_settings_reach_torch():
    printed = []
    console = SimpleNamespace(print=lambda *text, sep: printed.extend(text))
    mesh = SimpleNamespace(**vars(MESH) | {"picture": lambda: "the mesh"})
    on = {"parallel3d.train.tf32": True, "parallel3d.train.deterministic": True}
    try:
        start.begin(config_in("fp32", **on), mesh, console)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        start.begin(config_in("fp32"), mesh, console)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest" and printed[0] == "the mesh"
