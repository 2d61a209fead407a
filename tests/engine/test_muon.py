"""Muon's arithmetic is torch's, and each element travels to its matrix's home and back once."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from parallel3d.engine.muon import orthogonalise
from parallel3d.engine.selftest import self_test
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.traffic import Traffic
from parallel3d.model import optimizers
from parallel3d.model.optimizers import MATRIX
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.operators import curves_for, machine_of
from parallel3d.plan.time.sharding import slowest_matrix_work
from parallel3d.train.assembly import assemble
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import microbatches
from tests.cases import Case
from tests.engine.settings import settings_of
from tests.meshes import sizes_of
from tests.plan.settings import A100, changed
from tests.verify.measuring import batches, number_anew

pytestmark = pytest.mark.gloo

MUON = optimizers.load("muon")
SHAPES = [(8, 4), (4, 8), (6, 6), (1, 5)]


@pytest.fixture
def in_fp32():
    """torch's Muon in fp32: it casts to bf16 by this method."""
    with patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.clone()):
        yield


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_reference_equals_torch_muon(scale, nesterov, in_fp32):
    generator = torch.Generator().manual_seed(0)
    first = [torch.randn(shape, generator=generator) for shape in [*SHAPES, (5,)]]
    ours = [torch.nn.Parameter(weight.clone()) for weight in first]
    theirs = [torch.nn.Parameter(weight.clone()) for weight in first]
    shared = {"lr": 0.1, "weight_decay": 0.2}
    params = MUON.Params(lr=0.1, scale=scale, nesterov=nesterov, momentum=0.9, betas=(0.8, 0.9))
    groups = [{"params": ours[:-1], "views": lambda w: [w]}, {"params": ours[-1:], "eps": 1e-8}]
    plain = MUON.reference([group | shared for group in groups], params)
    right = [
        torch.optim.Muon(
            theirs[:-1], **shared, momentum=0.9, nesterov=nesterov, adjust_lr_fn=scale
        ),
        torch.optim.AdamW(theirs[-1:], **shared, betas=(0.8, 0.9)),
    ]
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        plain.step()
        for optimizer in right:
            optimizer.step()
    for a, b, start in zip(ours, theirs, first, strict=True):
        assert (a - b).abs().max() < 1e-5 < (b - start).abs().max()


@pytest.mark.parametrize("shape", SHAPES)
def test_stacks_are_orthogonalised_matrix_by_matrix(shape, in_fp32):
    stack = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    stack[1] = 0  # a matrix without a gradient stays where it is
    ours = orthogonalise(stack, MUON.Params(lr=1.0))
    for matrix, result in zip(stack, ours, strict=True):
        right = _zeropower_via_newtonschulz(matrix.clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
        torch.testing.assert_close(result, right, rtol=0, atol=1e-5)


def test_exact_coefficients_find_the_polar_factor():
    """Of well-conditioned matrices: U V^T of the singular value decomposition."""
    stack = torch.eye(6).expand(2, 6, 6) + 0.2 * torch.randn(2, 6, 6)
    params = MUON.Params(lr=1.0, coefficients="deepseekv4")
    u, _, v = torch.linalg.svd(stack)
    torch.testing.assert_close(orthogonalise(stack, params), u @ v, rtol=0, atol=2e-3)


def test_bf16_is_normalised_in_fp32():
    """A tiny gradient is not lost: its square is no number of bf16 or fp32."""
    stack = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    params = MUON.Params(lr=1.0, ns_dtype="bf16")
    large = orthogonalise(stack, params)
    small = orthogonalise(stack * 2.0**-20, params)
    assert torch.equal(large, small) and large.dtype == torch.float32
    exact = orthogonalise(stack, MUON.Params(lr=1.0))
    assert 1e-4 < (large - exact).norm() / exact.norm() < 0.03


MODES = [
    {"zero_stage": zero, "offload_optimizer": offload, "precision": precision}
    for zero, offload, precision in [
        (0, "none", "bf16"),
        (1, "cpu", "fp32"),
        (2, "none", "fp16"),
        (3, "cpu", "bf16"),
    ]
]


def self_tests(rank, shape, modes):
    params = {"lr": 1.0, "clip": "adam_only"}
    mesh = Mesh(**sizes_of(shape)._asdict())
    for mode in modes:
        self_test(settings_of(optimizer="Muon", params=params, **mode), mesh)
    return len(modes)


@pytest.mark.usefixtures("cpu_adam")
@pytest.mark.parametrize(
    ("shape", "modes"),
    [((1, 2, 1), MODES[::3]), pytest.param((1, 2, 2), MODES, marks=pytest.mark.slow)],
    ids=["two ranks", "four ranks"],
)
def test_self_test_passes_in_half_precision(shape, modes):
    size = sizes_of(shape).ranks
    assert run_locally(self_tests, size, shape, modes) == [len(modes)] * size


def traffic_each(rank, cases):
    return [traffic_of(case) for case in cases]


def traffic_of(case):
    """Bytes that this rank's exchanges send in a step, and the number of matrix elements."""
    number_anew()
    mesh = Mesh(**case.config.mesh.groups)
    parts = assemble(case.config, mesh, seed=0)
    tokens, labels, *_ = next(batches(case.config))
    parts.executor.run(microbatches((tokens, labels, None), case.config, mesh), 0)
    with Traffic(mesh, ("all_to_all",)) as traffic:
        parts.engine.step(1e-3)
    calls = [(c.group, c.calls, c.bytes) for c in traffic.calls]
    elements = sum(h.spec.numel for h in parts.engine.held if h.spec.role == MATRIX)
    parts.engine.close()
    return calls, elements


BY_MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}
SHARDED = Case(
    mesh=(1, 2, 2),
    zero_stage=1,
    changes=BY_MUON,
    microbatches=1,
    batch=4,
    steps=1,
    model={"num_hidden_layers": 2},
)
MOE = {
    "family": "moe",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "vocab_size": 64,
}
WHOLE = replace(
    SHARDED,
    mesh=(1, 4, 1),
    zero_stage=0,
    changes=BY_MUON | {"parallel3d.mesh.ep": 2},
    model=MOE,
)


@pytest.fixture(scope="module")
def traffic():
    """Return what the ranks of both cases sent, by case."""
    cases = [SHARDED, WHOLE]
    return dict(zip(cases, zip(*run_locally(traffic_each, 4, cases), strict=True), strict=True))


def test_each_element_travels_twice(traffic):
    check_travels(SHARDED, traffic[SHARDED])


@pytest.mark.slow
def test_each_element_travels_twice_under_zero3():
    case = replace(SHARDED, mesh=(2, 2, 1), zero_stage=3)
    check_travels(case, [row for (row,) in run_locally(traffic_each, 4, [case])])


def check_travels(case, ranks):
    _, dp, tp = case.mesh
    elements = sum(rank_elements for _, rank_elements in ranks[:: dp * tp])
    moved = 0
    for calls, _ in ranks:
        [(group, number, num_bytes)] = calls
        assert number == 2 and (group, tp) in {("dp", 1), ("world", 2)}
        moved += num_bytes
    # The larger side of each exchange is counted: no home has more than its share here.
    assert moved == pytest.approx(2 * 4 * elements, rel=1e-3)


def test_without_zero_all_copies_receive_the_update(traffic):
    """Every rank has a copy of the other matrices, dp / ep of an expert's; as it is planned."""
    ranks = traffic[WHOLE]
    setting = changed(Setting.from_config(WHOLE.config), precision="bf16")
    machine = machine_of(A100, setting.workload.software, curves_for(A100))
    planned = slowest_matrix_work(setting, machine).sent_bytes
    # Counted is the larger side: a home that does not own its expert sends more than it receives.
    assert sum(calls[0][2] for calls, _ in ranks) == pytest.approx(planned, rel=0.03)
