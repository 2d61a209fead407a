"""Hardware descriptions: sourced figures, found by the driver's name."""

import pytest

from parallel3d import hardware
from parallel3d.errors import ConfigError


@pytest.mark.parametrize("name", hardware.names())
def test_described_with_sources(name):
    described = hardware.load(name)
    assert described.name == name
    figures = [*described.peak_flops.values(), described.memory_bytes]
    assert all(figure.source for figure in figures)
    assert 1e14 < described.peak_flops[next(iter(described.peak_flops))].value < 1e16
    assert 1e10 < described.memory_bytes.value < 1e12


def test_peak():
    assert hardware.load("H100-SXM5-80GB").peak("bf16") == 989e12
    assert hardware.load("V100-SXM2-32GB").peak("bf16") is None


def test_recognise():
    found = hardware.recognise("NVIDIA A100-SXM4-80GB")
    assert found and found.name == "A100-SXM4-80GB"
    assert hardware.recognise("cpu") is None


def test_unknown_name():
    with pytest.raises(ConfigError, match=r'"abacus" is not described; .*H100-SXM5-80GB'):
        hardware.load("abacus")
