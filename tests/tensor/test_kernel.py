"""The logged attention kernel is the one that runs."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

from parallel3d.mesh.mesh import Mesh
from parallel3d.tensor import attention as attention_module
from parallel3d.tensor.attention import (
    CausalAttention,
    describe_kernel,
    kernel_of,
    log_kernel,
    prefer_flash_3,
)
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.documents import uses_flash_3
from parallel3d.tensor.random_key import RandomKey
from parallel3d.tensor.segments import Segments
from tests.counting import Calls

pytestmark = pytest.mark.gloo


CPU = torch.device("cpu")


def attend(dropout, context, heads):
    return CausalAttention(dropout, "a", context=context, heads=heads, head_size=8)


@pytest.fixture
def context():
    mesh = Mesh()
    yield LayerContext(mesh.tensor.group, RandomKey(0))
    mesh.close()


def test_logged_kernel_is_the_one_that_runs(context):
    """Against the operators that torch then calls; on a CPU, dropout alone has no fused kernel."""
    seen = set()
    for dropout, kv_heads, isolated, dtype in product(
        (0.0, 0.1), (2, 4), (False, True), (torch.float32, torch.bfloat16)
    ):
        q = torch.randn(2, 4, 16, 8, dtype=dtype, requires_grad=True)
        k, v = torch.randn(2, 2, kv_heads, 16, 8, dtype=dtype, requires_grad=True)
        segments = Segments.of(torch.arange(16).div(5).long().expand(2, 16)) if isolated else None
        attention = attend(dropout, context, heads=(4, kv_heads))
        logged = []
        sizes = {"batch": 2, "seq": 16, "dtype": dtype, "device": CPU, "isolated": isolated}
        with Calls() as asked:
            log_kernel(nn.Sequential(attention), logged.append, **sizes)
        assert not any("attention" in name for name in asked.names)  # before anything is computed
        with Calls() as ran:
            attention(q, k, v, segments)
        kernel = kernel_of(q, k, v, dropout)
        fused = any("flash_attention" in name for name in ran.names)
        assert kernel == (SDPBackend.FLASH_ATTENTION if fused else SDPBackend.MATH)
        assert logged == [describe_kernel(q, k, v, dropout)]
        assert ("WARNING" in logged[0]) == (kernel == SDPBackend.MATH)
        seen.add((kernel, dropout))
    assert seen == {(SDPBackend.FLASH_ATTENTION, 0.0), (SDPBackend.MATH, 0.1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_warning_names_what_has_a_fused_kernel_here(monkeypatch, dtype):
    """On a CPU another dropout; on devices that say so another precision, or both."""
    q, k, v = torch.randn(3, 2, 4, 16, 8).to(dtype)
    warning = describe_kernel(q, k, v, 0.1)
    assert warning.endswith("; try an attention dropout of 0")
    assert "WARNING" not in describe_kernel(q, k, v, 0.0)

    def only(fits):
        def choose(q, k, v, dropout, mask=None):
            return SDPBackend.FLASH_ATTENTION if fits(q, dropout) else SDPBackend.MATH

        monkeypatch.setattr(attention_module, "kernel_of", choose)
        return describe_kernel(q, k, v, 0.1).partition("; ")[2]

    half = only(lambda q, _: q.dtype != dtype)
    both = only(lambda q, rate: q.dtype != dtype and not rate)
    if dtype == torch.float32:
        assert (half, both) == ("try bf16", "try bf16 and an attention dropout of 0")
    else:
        assert (half, both) == ("", "")


def test_kernel_of_the_layer_with_the_widest_window_is_logged(context):
    """A mask has a fused kernel here, too; the operators that run are those of blocks."""
    windows = (3, 7)
    logged = []
    layers = [
        CausalAttention(0.0, "a", context=context, heads=(4, 2), head_size=8, window=w)
        for w in windows
    ]
    sizes = {"batch": 2, "seq": 300, "dtype": torch.float32, "device": CPU, "isolated": False}
    log_kernel(nn.Sequential(*layers), logged.append, **sizes)
    assert logged == ["kernel  attention runs as flash"]
    q = torch.randn(2, 4, 300, 8)
    with Calls() as ran:
        layers[1](q, q[:, :2], q[:, :2])
    assert sum("flash_attention" in name for name in ran.names) == 3


def test_documents_use_flash_attention_3_where_torch_has_it(context, monkeypatch):
    """Not beside dropout, which it lacks: its kernel takes the place of the other one, too."""
    activated = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    device = torch.device("cuda")
    plain = attend(0.0, context, heads=(4, 2))
    masked = attend(0.1, context, heads=(4, 2))
    for stages, isolated in (([plain], False), ([plain, masked], True)):
        prefer_flash_3(nn.Sequential(*stages), device, isolated=isolated)
    assert activated == []
    prefer_flash_3(plain, device, isolated=True)
    assert activated == ["FA3"]
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    prefer_flash_3(plain, device, isolated=True)  # torch has it, but not the package
    assert not uses_flash_3()


def test_kernel_of_documents_is_logged(context, monkeypatch):
    monkeypatch.setattr(attention_module, "in_one_kernel", lambda q, p: True)
    logged = []
    sizes = {"batch": 2, "seq": 16, "dtype": torch.bfloat16, "device": CPU, "isolated": True}
    for has_third in (False, True):
        monkeypatch.setattr(attention_module, "uses_flash_3", lambda has=has_third: has)
        log_kernel(attend(0.0, context, heads=(4, 2)), logged.append, **sizes)
    assert logged == [f"kernel  attention runs as flash{version}" for version in ("", " 3")]


def test_kernel_of_dealt_tokens_is_logged(context):
    """On a GPU, where blocks have its size."""
    sizes = {"batch": 2, "dtype": torch.bfloat16, "isolated": True}
    logged = []
    for device, seq in (("cuda", 2048), ("cuda", 512), ("cpu", 2048)):
        layer = attend(0.0, context, heads=(4, 2))
        layer.cp = 4
        log_kernel(
            nn.Sequential(layer), logged.append, seq=seq, device=torch.device(device), **sizes
        )
    assert ["flex" in line for line in logged] == [True, False, False]


def test_kernel_of_capped_scores_is_logged(context):
    """On a GPU, where its tiles divide the sequence."""
    sizes = {"batch": 2, "dtype": torch.bfloat16, "isolated": False}
    layer = CausalAttention(0.0, "a", context=context, heads=(4, 2), head_size=8, softcap=50.0)
    logged = []
    for device, seq in (("cuda", 256), ("cuda", 200), ("cpu", 256)):
        log_kernel(layer, logged.append, seq=seq, device=torch.device(device), **sizes)
    assert ["flex" in line for line in logged] == [True, False, False]


def test_no_kernel_is_logged_without_attention(context):
    logged = []
    sizes = {"batch": 2, "seq": 16, "dtype": torch.float32, "device": CPU, "isolated": False}
    log_kernel(nn.Linear(2, 2), logged.append, **sizes)
    assert not logged
