"""The numbers on devices: those of plain transformers, on every mesh, schedule and precision."""

from itertools import product

import pytest
import torch

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import RunConfig
from parallel3d.schedule import schedules
from parallel3d.verify.measure import TOLERANCE
from parallel3d.verify.shrink import shrink
from tests.gpu import here
from tests.meshes import sizes_of
from tests.verify.configs import MODELS, config_of
from tests.verify.measuring import measure, reference_on_batches

pytestmark = pytest.mark.gpu

MESHES = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
STAGES = {}
for name in schedules.names():
    for stages in (2, 1):  # one stage a rank where a schedule has it
        if schedules.why_not(name, 4, 8, stages) is None:
            STAGES[name] = stages


def errors_of(mesh, folder, overlap=None, update=False, on_host="none", changes=None, **settings):
    """The largest differences of a config on a mesh from one process on a CPU.

    `changes`: values of the block `parallel3d` by section and name.
    """
    sizes = sizes_of(mesh)
    here.enough(sizes.ranks)
    raw = config_of(**settings)
    raw["parallel3d"]["train"]["overlap_update"] = update
    raw["parallel3d"]["pipeline"]["offload_activations"] = on_host
    for section, values in (changes or {}).items():
        raw["parallel3d"][section] |= values
    if overlap is not None:
        raw["zero_optimization"]["overlap_comm"] = overlap
    config = shrink(RunConfig.from_dict(raw), (sizes, MeshSizes(tp=4)), str(folder))[sizes]
    return measure(config, reference_on_batches(config, folder))


def test_products_are_not_tf32():
    assert not torch.backends.cuda.matmul.allow_tf32


def cases():
    """(mesh, settings) of each run; those of the two half precisions are last."""
    for mesh, model in product(MESHES, MODELS):
        yield mesh, {"model": model, "sequence_parallel": True}
    for mesh, offload, update in product([(1, 1, 1), (2, 2, 1)], ["cpu", "cpu+cpu"], [False, True]):
        yield mesh, {"offload": offload, "update": update}
    # Sends and receives of every schedule, between two and four devices.
    for pp, schedule, zero in product([1, 2, 4], STAGES, range(4)):
        stages = {"schedule": schedule, "stages_per_rank": STAGES[schedule]}
        yield (pp, 1, 1), {**stages, "zero": zero, "microbatches": 8}
    # Gradients that are reduced on streams of their own, behind the backward pass.
    reductions = ["per_step", "per_microbatch"]
    for mesh, how, overlap, zero in product(
        [(1, 2, 1), (2, 2, 1)], reductions, [False, True], [2, 3]
    ):
        yield mesh, {"reduction": how, "overlap": overlap, "zero": zero}
    ways = ["none", "selective", "full", "full:1", "mlp", "layernorm+mlp_act"]
    for checkpointing, isolate in product(ways, [False, True]):
        yield (1, 1, 1), {"checkpointing": checkpointing, "isolate": isolate}
    for mesh, checkpointing in product([(1, 1, 1), (2, 1, 2)], ["none", "mlp", "full"]):
        yield mesh, {"checkpointing": checkpointing, "on_host": "cpu"}
    for mesh, precision, model in product(MESHES, ["bf16", "fp16"], ["gpt", "llama"]):
        yield mesh, {"precision": precision, "model": model}


@pytest.mark.parametrize(("mesh", "settings"), list(cases()), ids=str)
def test_numbers_match_plain_transformers(mesh, settings, tmp_path):
    errors = errors_of(mesh, tmp_path, **settings)
    precision = settings.get("precision", "fp32")
    bound = here.TOLERANCE if precision == "fp32" else TOLERANCE[precision]
    assert errors.within(bound), errors
