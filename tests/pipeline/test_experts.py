"""Experts: losses, norms, weights and loads of one plain process on every mesh (plain_moe.py)."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from parallel3d import models
from parallel3d.model import optimizers
from parallel3d.model.optimizers import MATRIX
from parallel3d.model.spec import named_params
from parallel3d.schedule.schedules import names, splits_backward, why_not
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import microbatches
from parallel3d.verify.reference import FIRST, Reference, first_weights, relative
from tests.cases import Case, Trainer, any_weights
from tests.engine.test_fp16 import spoil_next_gradient
from tests.meshes import sizes_of
from tests.models.plain_moe import Plain
from tests.verify.measuring import batches, errors_of, plain_course

pytestmark = pytest.mark.gloo

# 12 for three replicas, or more microbatches
BATCH = 8
MICRO = 2
MOE = {
    "family": "moe",
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "intermediate_size": 40,
    "initializer_range": 0.15,
    "vocab_size": 61,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
# Each router with what goes with it; every side loss, norm and MLP in one of them.
SOFTMAX = {
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.1,
    "router_z_loss_coef": 0.01,
    "qk_norm": True,
    "qk_norm_over": "width",
    "num_key_value_heads": 2,
}
SIGMOID = {
    "router": "sigmoid",
    "norm_topk_prob": True,
    "score_bias": True,
    "score_bias_rate": 0.01,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "router_aux_loss_coef": 0.1,
    "router_aux_loss": "sequence",
}
POOLED = SOFTMAX | {"router_aux_loss": "pooled"}
TOP_FIRST = {
    "router": "topk_softmax",
    "score_bias": True,
    "capacity_factor": 1.25,
    "qk_norm": True,
    "moe_intermediate_size": 20,
    "decoder_sparse_step": 2,
}
SPLIT = {"sequence_parallel": True, "checkpointing": "full"}
HELD = {"weights": "per_pass", "reduction": "per_step"}


def case_of(mesh, schedule="gpipe", model=SOFTMAX, **settings):
    once = splits_backward(schedule)
    dp = sizes_of(mesh).dp
    batch = settings.pop("batch", 12 if dp == 3 else BATCH)
    settings = {"reduction": "per_step" if once else "per_microbatch"} | settings
    changes = settings.pop("changes", {})
    if settings.pop("muon", False):
        changes["optimizer"] = {"type": "Muon", "params": {"lr": 1e-3, "weight_decay": 0.1}}
    changes["optimizer.params.eps"] = 1e-6
    changes["parallel3d.mesh.ep"] = settings.pop("ep", 1)
    return Case(
        mesh=mesh,
        schedule=schedule,
        batch=batch,
        steps=2,
        microbatches=batch // (MICRO * dp),
        changes=changes,
        model=MOE | model,
        **settings,
    )


_REFERENCES = {}


def reference_of(case, folder):
    """One process in fp64: what a mesh is compared with, and each step's loads by layer."""
    config = case.config
    model = config.model.model_dump(mode="json")
    key = json.dumps([model, config.optimizer.type, config.global_batch_size])
    if key not in _REFERENCES:
        torch.set_num_threads(1)
        file = folder.mktemp("plain") / "weights.safetensors"
        _REFERENCES[key] = train_plainly(config, file)
    return _REFERENCES[key]


def _matrices(weight):
    """The matrices of a stack: the experts' gates and ups, and q, k and v."""
    return list(weight.reshape(-1, *weight.shape[-2:]))


def train_plainly(config, file):
    specs = named_params(models.layers(config.model))
    weights = {n: w.double().requires_grad_() for n, w in first_weights(config).items()}
    biases = {n for n in weights if n.endswith("score_bias")}
    params = config.optimizer.params
    of = config.optimizer.type
    groups = [
        {"params": [w], "weight_decay": params.weight_decay * specs[n].weight_decay}
        | ({"views": _matrices} if of == "muon" and specs[n].role == MATRIX else {})
        for n, w in weights.items()
        if n not in biases
    ]
    if of == "muon":
        groups = [group | {"lr": params.lr, "eps": params.eps} for group in groups]
        optimizer = optimizers.load(of).reference(groups, params)
    else:
        optimizer = torch.optim.AdamW(groups, lr=params.lr, betas=params.betas, eps=params.eps)
    course = plain_course(config)
    model = Plain(config.model, weights)
    losses = []
    norms = []
    loads = []
    save_file(first_weights(config), file.parent / FIRST)
    for tokens, labels, *_ in course.steps:
        optimizer.zero_grad()
        model.counts = {}
        total = 0.0
        parts = [*zip(tokens.split(MICRO), labels.split(MICRO), strict=True)]
        for x, y in parts:
            loss = model.loss(x, y) / len(parts)
            (loss + model.side / len(parts)).backward()
            total += loss.item()
        losses.append(total)
        trained = [w for n, w in weights.items() if n not in biases]
        norms.append(float(nn.utils.clip_grad_norm_(trained, config.gradient_clipping)))
        optimizer.step()
        loads.append({n: c / c.mean() for n, c in model.counts.items()})
        with torch.no_grad():
            for name in biases:
                counts = model.counts[name.removesuffix(".mlp.router.score_bias")]
                weights[name] += config.model.score_bias_rate * (counts.mean() - counts).sign()
    save_file({n: w.detach().float().contiguous() for n, w in weights.items()}, file)
    return Reference(losses, norms, str(file), 0.0, course), loads


def train_on_rank(rank, cases, references):
    results = []
    for case, reference in zip(cases, references, strict=True):
        trainer = Trainer(case)
        executor = trainer.executor
        side_losses = []
        run = trainer.executor.run

        def noted(batch, step, run=run, executor=executor, side_losses=side_losses):
            loss = run(batch, step)
            side_losses.append({n: v.tolist() for n, v in executor.side_losses.items() if v.dim()})
            return loss

        executor.run = noted
        errors = trainer.compare(reference)
        share = microbatches(next(batches(trainer.config)), trainer.config, trainer.mesh)
        trainer.evaluator.run(share)
        results.append((errors, side_losses))
        trainer.close()
    return results


def check(cases, folder, tolerance=1e-5):
    references = [reference_of(case, folder) for case in cases]
    (size,) = {case.world_size for case in cases}
    ranks = run_locally(
        train_on_rank, size, cases, [reference for reference, _ in references], timeout=300
    )
    for number, (case, (_, loads)) in enumerate(zip(cases, references, strict=True)):
        measured, side = zip(*(rank[number] for rank in ranks), strict=True)
        errors = errors_of(case.config, measured)
        assert errors.within(tolerance), f"{case}: {errors}"
        _, dp, cp, tp = sizes_of(case.mesh)
        for step, expected in enumerate(loads):
            for layer, load in expected.items():
                rows = [s[step][f"{layer}.loads"] for s in side if f"{layer}.loads" in s[step]]
                own = torch.tensor(rows).sum(0)[:-1] / (dp * cp * tp)
                assert max(relative(own.tolist(), load.tolist())) < 1e-5 or torch.allclose(
                    own, load
                )


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory


@pytest.mark.slow  # by default each routing is on two ranks
def test_on_one_rank(folder, operators):
    """Each routing, with DeepSpeed's hooks and without."""
    check(
        [
            case_of((1, 1, 1), zero_stage=0, reduction="per_step"),
            case_of((1, 1, 1), model=SIGMOID, zero_stage=3),
            case_of((1, 1, 1), model=TOP_FIRST, zero_stage=1, checkpointing="full"),
        ],
        folder,
    )


def test_on_two_ranks(folder):
    """What cuts, recomputes, holds or sums in another way, each with a routing that it touches.

    The case with cp has a side loss over a microbatch's tokens: with a rank's own means the norm
    of the gradients would differ by 1e-3.
    """
    check(
        [
            case_of((2, 1, 1), "zero_bubble", weights="per_pass", checkpointing="full", batch=4),
            case_of((1, 1, 2), model=POOLED, zero_stage=1, batch=4, **SPLIT),
            case_of((1, 1, 2, 1), zero_stage=1, batch=4, checkpointing="full"),
            case_of((1, 2, 1), model=SIGMOID, ep=2, muon=True, **HELD),
        ],
        folder,
    )


@pytest.mark.slow  # by default ranks that divide experts have the routing and ZeRO-2
def test_more_on_two_ranks(folder):
    check(
        [
            case_of((1, 2, 1), model=TOP_FIRST, weights="per_step", reduction="per_step"),
            case_of((1, 2, 1), model=SIGMOID, ep=2, zero_stage=2),
        ],
        folder,
    )


@pytest.mark.slow  # by default sigmoid routing is on ranks that divide experts
def test_sigmoid_routing_on_two_ranks(folder):
    check(
        [
            case_of((1, 1, 2), model=SIGMOID, **SPLIT),
            case_of((1, 1, 2), model=POOLED, **SPLIT),
            case_of((2, 1, 1), "zero_bubble", model=SIGMOID, zero_stage=1),
        ],
        folder,
    )


def test_divided_over_ranks(folder):
    """Beside tensor parallelism, and beside cp with a side loss over a sample's tokens."""
    check(
        [
            case_of(
                (1, 2, 2),
                model=TOP_FIRST,
                ep=2,
                sequence_parallel=True,
                checkpointing="full",
                **HELD,
            ),
            case_of((1, 2, 2, 1), model=SIGMOID, zero_stage=2, ep=2, batch=4),
        ],
        folder,
    )


def two_shards():
    """Two copies of the shards, each with all experts."""
    return {"parallel3d.mesh.dp_shards": 2}


@pytest.mark.slow  # by default copies of other weights: tests/engine/test_copies.py
@pytest.mark.parametrize("ep", [1, 2])
def test_experts_with_copies_of_shards(ep, folder, cpu_adam):
    check(
        [
            case_of((1, 4, 1), model=SOFTMAX, ep=ep, zero_stage=1, changes=two_shards()),
            case_of((1, 4, 1), model=SIGMOID, ep=ep, zero_stage=2, changes=two_shards()),
            case_of(
                (1, 4, 1),
                model=SIGMOID,
                ep=ep,
                zero_stage=3,
                reduction="per_step",
                offload="cpu",
                changes=two_shards(),
            ),
            case_of((1, 4, 1), model=SOFTMAX, ep=ep, muon=True, changes=two_shards()),
        ],
        folder,
    )


@pytest.mark.slow  # by default each without the other
def test_experts_with_cp_and_sequence_parallelism(folder):
    check([case_of((1, 1, 2, 2), zero_stage=1, batch=4, **SPLIT)], folder)


def skip_on_rank(rank, cases):
    """For each case biases after a skipped step, and after the next one with the counts of that."""
    results = []
    for case in cases:
        with any_weights():
            trainer = Trainer(case)
        engine = trainer.engine
        biases = [h for h in engine.held if h.name.endswith("score_bias")]
        first, second = trainer.batches()
        overflows = case.precision == "fp16"
        if overflows:
            spoil_next_gradient(engine)
        trainer.executor.run(first)
        skipped = engine.step(trainer.lr, None if overflows else lambda norm: False)
        after_skip = [engine.full_parameter(h).tolist() for h in biases]
        trainer.executor.run(second, 1)
        engine.step(trainer.lr)
        after_step = [engine.full_parameter(h).tolist() for h in biases]
        modules = trainer.stages.module.modules()
        counts = [m.counts.tolist() for m in modules if hasattr(m, "score_bias")]
        results.append((skipped, after_skip, after_step, counts))
        trainer.close()
    return results


def test_skipped_step_moves_no_bias():
    """Neither a refused step nor one that overflows, nor do their tokens count in the next one."""
    refused = case_of((1, 1, 1), model=SIGMOID, zero_stage=1, batch=4)
    scale = {"fp16.initial_scale_power": 10}
    fp16 = {"precision": "fp16", "changes": scale}
    overflowing = case_of((1, 1, 1), model=SIGMOID, zero_stage=3, batch=4, **fp16)
    (results,) = run_locally(skip_on_rank, 1, [refused, overflowing])
    for skipped, after_skip, after_step, counts in results:
        assert not skipped.applied
        assert not torch.tensor(after_skip).any()
        counts = torch.tensor(counts, dtype=torch.float64)
        expected = 0.01 * (counts.mean(-1, keepdim=True) - counts).sign()
        torch.testing.assert_close(torch.tensor(after_step), expected.float())
    assert results[1][0].overflow


@pytest.mark.slow  # cp beside pp by default: tests/verify/test_parity.py
@pytest.mark.parametrize(
    ("mesh", "ep"),
    [((2, 1, 2, 1), 1), ((1, 1, 4, 1), 1), ((1, 2, 2, 2), 2), ((2, 1, 2, 2), 1), ((2, 2, 2, 1), 2)],
    ids=str,
)
def test_experts_with_cp_on_every_mesh(mesh, ep, folder, cpu_adam):
    """Each ZeRO stage, with and without sums over a sample."""
    schedule = "one_f_one_b" if mesh[0] > 1 else "gpipe"
    softmax = SOFTMAX | {"router_aux_loss": "sequence"}
    cases = [
        case_of(mesh, schedule, model, ep=ep, zero_stage=stage)
        for stage, model in ((0, SIGMOID), (1, SOFTMAX), (2, softmax), (3, SIGMOID))
    ]
    cases.append(case_of(mesh, schedule, SIGMOID, ep=ep, zero_stage=2, offload="cpu"))
    check(cases, folder)


@pytest.mark.slow  # by default test_on_two_ranks has Muon without stages
def test_muon_with_stages(folder):
    """Each expert's matrix has a home, which need not be one of its owners."""
    check([case_of((2, 2, 1), "one_f_one_b", ep=2, zero_stage=0, muon=True)], folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "ep"),
    [
        ((1, 1, 1), 1),
        ((2, 1, 2), 1),
        ((2, 2, 1), 2),
        ((1, 4, 1), 2),
        ((1, 4, 1), 4),
        ((2, 2, 2), 2),
    ],
    ids=str,
)
def test_muon_on_every_mesh(mesh, ep, folder, cpu_adam):
    """Each ZeRO stage and offload that Muon has."""
    schedule = "one_f_one_b" if mesh[0] > 1 else "gpipe"
    settings = [{"zero_stage": stage} for stage in range(4)]
    settings += [{"zero_stage": stage, "offload": "cpu"} for stage in (1, 2, 3)]
    settings += [{"weights": "per_step", "reduction": "per_step"}]
    check([case_of(mesh, schedule, SIGMOID, ep=ep, muon=True, **own) for own in settings], folder)


@pytest.mark.slow
@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("pp", [1, 2])
def test_divided_on_every_mesh(pp, tp, ep, folder, cpu_adam):
    """Each mesh with each ZeRO stage, offload and way of holding weights."""
    mesh = (pp, ep, tp)
    schedule = "one_f_one_b" if pp > 1 else "gpipe"
    if pp * ep * tp > 8:
        mesh = (pp, 2, tp)  # 16 ranks would be too many here
    cases = [case_of(mesh, schedule, SIGMOID, ep=min(ep, mesh[1]), zero_stage=s) for s in range(4)]
    cases += [
        case_of(mesh, schedule, SIGMOID, ep=min(ep, mesh[1]), **settings)
        for settings in (
            {"zero_stage": 1, "offload": "cpu", "reduction": "per_step"},
            {"zero_stage": 2, "offload": "cpu"},
            {"zero_stage": 3, "offload": "cpu+param-cpu"},
            {"weights": "per_step", "reduction": "per_step"},
            {"weights": "per_pass", "checkpointing": "full"},
            {"zero_stage": 3, "precision": "fp32", "checkpointing": "selective"},
        )
    ]
    check(cases, folder)


@pytest.mark.slow
@pytest.mark.parametrize("model", [SOFTMAX, SIGMOID, TOP_FIRST], ids=["softmax", "sigmoid", "top"])
def test_divided_with_every_routing(model, folder):
    settings = [{"zero_stage": stage, "weights": "per_microbatch"} for stage in range(4)]
    settings.append({"zero_stage": 3, "weights": "per_step"})
    check([case_of((2, 2, 1), "one_f_one_b", model, ep=2, **own) for own in settings], folder)


@pytest.mark.slow
@pytest.mark.parametrize("model", [SOFTMAX, SIGMOID, TOP_FIRST], ids=["softmax", "sigmoid", "top"])
@pytest.mark.parametrize(
    "mesh", [(1, 1, 1), (4, 1, 1), (1, 3, 1), (1, 1, 4), (2, 1, 2), (2, 3, 1), (2, 2, 2)], ids=str
)
def test_every_mesh(mesh, model, folder, cpu_adam):
    """The whole table: each mesh with each ZeRO stage, offload and routing."""
    pp, dp, tp = mesh
    schedule = "one_f_one_b" if pp > 1 else "gpipe"
    if dp == 3 and model is TOP_FIRST:
        # A third is not exact: an expert with just the mean load would step by rounding.
        model = model | {"score_bias_rate": 0.0}
    cases = [case_of(mesh, schedule, model, zero_stage=stage) for stage in range(4)]
    cases += [
        case_of(mesh, schedule, model, zero_stage=stage, offload="cpu", reduction="per_step")
        for stage in (1, 2, 3)
    ]
    cases.append(case_of(mesh, schedule, model, offload="cpu+param-cpu", weights="per_pass"))
    if tp > 1:
        cases.append(case_of(mesh, schedule, model, sequence_parallel=True, checkpointing="full"))
    check(cases, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_every_schedule(name, folder):
    """Each schedule, with a routing whose bias counts each microbatch once."""
    stages = next((n for n in (2, 1) if not why_not(name, 2, 6, n)), None)
    if stages is None:
        pytest.skip(why_not(name, 2, 6, 1))
    settings = {"stages_per_rank": stages, "batch": 12}
    check(
        [
            case_of((2, 1, 1), name, SIGMOID, checkpointing=kind, **settings)
            for kind in ("none", "selective", "full")
        ],
        folder,
    )
    if not why_not(name, 2, 3, stages):
        check([case_of((2, 2, 1), name, SIGMOID, ep=2, **settings)], folder)
