"""Training on from a published model: the losses and weights of plain transformers."""

from math import prod

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from parallel3d import models
from parallel3d.config import RunConfig
from parallel3d.huggingface.from_ranks import save_weights
from parallel3d.huggingface.initial_weights import find_weights, load_weights
from parallel3d.mesh.mesh import Mesh
from parallel3d.models.common import pretrained_of
from parallel3d.train.assembly import assemble
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.reference import in_our_names, train_model
from parallel3d.verify.shrink import NO_THRESHOLDS
from tests.huggingface.published import MODELS, run_config, save
from tests.models.families import part
from tests.verify.measuring import differences, errors_of, plain_course, train

pytestmark = pytest.mark.gloo

OUT = "weights"
CHANGES = {
    name: {"parallel3d.model.score_bias_rate": 0.0}
    for name in ("dots1, groups", "glm4_moe, part of a head", "glm4_moe, norms")
}


def config_on(folder, mesh, **changes):
    """The complete config of a run on a mesh (pp, dp, tp), of the same global batch on all."""
    pp, dp, tp = mesh
    sizes = {"parallel3d.mesh": {"pp": pp, "dp": dp, "tp": tp}, "train_batch_size": 8}
    raw = run_config(folder, **sizes, **changes)
    raw["train_micro_batch_size_per_gpu"] = 8 // (2 * dp)
    raw["zero_optimization"] = NO_THRESHOLDS | raw["zero_optimization"]
    return RunConfig.from_dict(raw).resolve(pp * dp * tp).completed()


def started(config):
    mesh = Mesh(pp=config.mesh.pp, dp=config.mesh.dp, tp=config.mesh.tp)
    parts = assemble(config, mesh)
    folder = find_weights(config.model, pretrained_of(config.model), mesh)
    load_weights(folder, config.model, engine=parts.engine, mesh=mesh, layers=parts.layers)
    return mesh, parts


def train_on_rank(rank, config, reference):
    mesh, parts = started(config)
    errors = differences(parts, config, train(parts, config, mesh), reference)
    mesh.barrier()
    parts.engine.close()
    return errors


def largest_errors(folder, mesh, tmp_path, **changes):
    config = config_on(folder, mesh, **changes)
    assert not getattr(config.model, "score_bias", False) or not config.model.score_bias_rate
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    family = models.huggingface(config.model.family)
    if name_as_in_files := getattr(family, "named_as_in_files", None):
        model = name_as_in_files(model)
    reference = train_model(model.double().train(), family, config, tmp_path, plain_course(config))
    pp, dp, tp = mesh
    return errors_of(config, run_locally(train_on_rank, pp * dp * tp, config, reference))


def test_continued_training_equals_transformers(tmp_path):
    folder = save("qwen3_moe, dense layers", tmp_path / "model")
    errors = largest_errors(folder, (1, 1, 2), tmp_path, **{"parallel3d.train.steps": 1})
    assert errors.within(1e-5), errors


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 2), (2, 2, 2), (1, 1, 4)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_continued_training_of_each_architecture_on_each_mesh(name, mesh, tmp_path):
    errors = largest_errors(save(name, tmp_path / "model"), mesh, tmp_path, **CHANGES.get(name, {}))
    print(name, mesh, errors)
    assert errors.within(1e-5), errors


def save_on_rank(rank, folders, mesh_sizes):
    """Train one tiny step from each folder on a mesh, and save the weights beside it."""
    for folder in folders:
        changes = {"optimizer.params.lr": 1e-12, "parallel3d.train.steps": 1}
        config = config_on(folder, mesh_sizes, **changes, **CHANGES.get(folder.name, {}))
        mesh, parts = started(config)
        train(parts, config, mesh)
        save_weights(parts.engine, mesh, folder, config=config)
        parts.engine.close()


FEW = ("llama, biases, yarn", "neox one after the other")
EXPERTS = ("qwen3_moe, dense layers", "dots1, groups")
MORE_EXPERTS = ("mixtral", "olmoe", "glm4_moe, part of a head")
OTHERS = tuple(n for n in MODELS if "," in n and n not in FEW + EXPERTS + MORE_EXPERTS)


@pytest.mark.parametrize(
    ("names", "mesh"),
    [
        (EXPERTS[1:], (2, 1, 1)),
        pytest.param(EXPERTS[:1], (2, 1, 1), marks=pytest.mark.slow),
        pytest.param(EXPERTS, (2, 1, 2), marks=pytest.mark.slow),
        pytest.param(FEW, (1, 1, 2), marks=pytest.mark.slow),
        pytest.param(MORE_EXPERTS, (2, 1, 2), marks=pytest.mark.slow),
        pytest.param(OTHERS, (1, 1, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_export_after_a_tiny_step_is_the_same_model(names, mesh, tmp_path):
    """The same bits, and a config.json by which transformers computes the same logits."""
    folders = [save(name, tmp_path / name) for name in names]
    run_locally(save_on_rank, prod(mesh), folders, mesh)
    tokens = torch.randint(61, (2, 64), generator=torch.Generator().manual_seed(4))
    for folder in folders:
        original, exported = (load_file(at / "model.safetensors") for at in (folder, folder / OUT))
        assert exported.keys() == original.keys(), folder
        assert all(torch.equal(exported[n], value) for n, value in original.items()), folder
        models_read = [AutoModelForCausalLM.from_pretrained(at) for at in (folder, folder / OUT)]
        logits, expected = (model(tokens).logits for model in models_read)
        assert torch.equal(logits, expected), folder


def held_on_rank(rank, configs):
    """What each rank holds once its weights are loaded: name, cut, value."""
    held_by_config = []
    for config in configs:
        mesh, parts = started(config)
        held_by_config.append(
            [(h.name, h.cut, parts.engine.full_parameter(h).cpu()) for h in parts.engine.held]
        )
        mesh.barrier()
        parts.engine.close()
    return held_by_config


# Each a mesh, a stage of ZeRO, and where the optimizer is.
ON_TWO = [((2, 1, 1), 0, "none"), ((1, 2, 1), 3, "cpu")]
ON_FOUR = [((2, 1, 2), 0, "none"), ((1, 2, 2), 3, "cpu")]


@pytest.mark.usefixtures("cpu_adam")
@pytest.mark.parametrize("runs", [ON_TWO, pytest.param(ON_FOUR, marks=pytest.mark.slow)])
def test_every_shard_has_exactly_its_elements(tmp_path, runs):
    """From bfloat16, which fp32 masters hold to the bit; at ZeRO 0, and 3 with offload."""
    folder = save("qwen3", tmp_path / "model", torch.bfloat16)
    configs = []
    for mesh, stage, offload in runs:
        zero = {"stage": stage} | ({"offload_optimizer": {"device": offload}} if stage else {})
        configs.append(config_on(folder, mesh, **{"zero_optimization": zero}))
    theirs = {n: v.float() for n, v in load_file(folder / "model.safetensors").items()}
    wanted = in_our_names(configs[0].model, theirs)
    for rank in run_locally(held_on_rank, prod(runs[0][0]), configs):
        for held in rank:
            assert held
            for name, cut, value in held:
                original = name if name in wanted else "embedding.token.weight"  # it is tied
                assert torch.equal(value, part(wanted[original], cut)), name
