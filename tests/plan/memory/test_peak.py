"""The planner's memory: what must hold for every setting, whatever the numbers."""

from functools import cache
from itertools import accumulate
from math import ceil, log2
from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from parallel3d.config import RunConfig, ZeroConfig
from parallel3d.config.hardware import load
from parallel3d.model.recompute import FULL, NONE, SELECTIVE
from parallel3d.model.spec import Shape
from parallel3d.model.transformer_cost import num_chunks
from parallel3d.models.gpt.spec import Config
from parallel3d.plan.layers.placement import in_flight, model_of, stages_of, stages_on
from parallel3d.plan.memory.peak import (
    COMMUNICATOR,
    KEPT_MESSAGES,
    PARTS,
    fullest,
    margin,
    peak_of,
    per_rank,
    saved_bytes,
)
from parallel3d.plan.setting import ActionOrder, Setting, layers_of
from parallel3d.schedule.action import Op
from parallel3d.schedule.partition import partition
from parallel3d.schedule.schedule import peak_in_flight
from parallel3d.schedule.schedules import make_schedule, names, why_not
from parallel3d.schedule.sharding import Weights
from tests.plan.settings import changed, new_setting, shape_of

pytestmark = pytest.mark.pure

A100 = load("A100-SXM4-80GB")


def gpt(hidden_size, blocks, vocab_size=32_000, seq=1024, tied=True):
    return layers_of(
        Config(
            family="gpt",
            hidden_size=hidden_size,
            num_hidden_layers=blocks,
            num_attention_heads=8,
            vocab_size=vocab_size,
            max_position_embeddings=seq,
            tie_word_embeddings=tied,
        )
    )


MODELS = {
    (size, blocks, tied): gpt(size, blocks, tied=tied)
    for size, blocks, tied in ((256, 6, True), (1024, 14, True), (2048, 31, False))
}
ORDERS = [
    ("gpipe", 1),
    ("one_f_one_b", 1),
    ("v_shape", 2),
    ("interleaved", 2),
    ("interleaved", 3),
    ("breadth_first", 3),
]


@st.composite
def settings(draw, **fixed):
    (hidden_size, _, _), layers = draw(st.sampled_from(sorted(MODELS.items(), key=str)))
    schedule, stages_per_rank = draw(st.sampled_from(ORDERS))
    pp = draw(st.sampled_from([p for p in (1, 2, 4, 8) if p * stages_per_rank <= len(layers)]))
    chosen = {
        "layers": layers,
        "hidden_size": hidden_size,
        "shape": Shape(draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([128, 1024]))),
        "num_microbatches": draw(st.integers(1, 40)),
        "pp": pp,
        "dp": draw(st.sampled_from([1, 2, 4, 32])),
        "tp": (tp := draw(st.sampled_from([1, 2, 8]))),
        "sequence_parallel": tp > 1 and draw(st.booleans()),
        "schedule": schedule,
        "stages_per_rank": stages_per_rank,
        "recompute": draw(st.sampled_from([NONE, SELECTIVE, FULL])),
        "precision": draw(st.sampled_from(["fp32", "bf16"])),
        "zero_stage": (zero := draw(st.integers(0, 3))),
        "reduces_once": zero == 0 or draw(st.booleans()),
        "weights": draw(st.sampled_from(get_args(Weights))),
        "offload_optimizer": draw(
            st.sampled_from(["none", "cpu", "nvme"][: 1 if zero == 0 else 3])
        ),
        "offload_param": draw(st.sampled_from(["none", "cpu"] if zero == 3 else ["none"])),
        "buffers": draw(st.sampled_from([ZeroConfig(stage=0), fitted(hidden_size)])),
    }
    return new_setting(**(chosen | fixed))


def fitted(hidden_size):
    """Buckets that suit a model, and no gathering ahead."""
    return ZeroConfig(
        stage=0,
        reduce_bucket_size=hidden_size**2,
        stage3_prefetch_bucket_size=0,
        stage3_param_persistence_threshold=10 * hidden_size,
        stage3_max_reuse_distance=0,
    )


machines = st.sampled_from([None, A100])
few = hypothesis_settings(max_examples=15)


def test_memory_of_nccl_is_estimated_on_gpus():
    """Communicators: world, pp, pp backward, dp, tp, model. Messages: with two neighbours."""
    shape = Shape(2, 128)
    one = new_setting(gpt(256, 6), 256, shape, 8, schedule="one_f_one_b")
    mesh = changed(one, pp=4, dp=2, tp=2)
    message = shape.tokens * 256 * 2

    def outside(setting, coord, machine):
        parts = peak_of(setting, coord, machine).parts
        return parts["margin"] - margin(sum(parts.values()) - parts["margin"], machine)

    assert outside(one, 0, A100) == 0
    assert outside(changed(one, dp=8), 0, A100) == COMMUNICATOR  # dp is the world
    assert outside(changed(one, dp=4, tp=2), 0, A100) == 4 * COMMUNICATOR  # world, dp, tp, model
    assert outside(mesh, 0, A100) == 6 * COMMUNICATOR + KEPT_MESSAGES * message
    assert outside(mesh, 1, A100) == 6 * COMMUNICATOR + 2 * KEPT_MESSAGES * message
    assert outside(changed(mesh, sequence_parallel=True), 3, A100) == (
        6 * COMMUNICATOR + KEPT_MESSAGES * message // 2
    )
    # v_shape: stages 3 and 4 are on one rank, so no message passes between them.
    bent = changed(mesh, schedule="v_shape", stages_per_rank=2)
    assert outside(bent, 3, A100) == 6 * COMMUNICATOR + 2 * KEPT_MESSAGES * message
    assert peak_of(mesh, 1).parts["margin"] == 0


@few
@given(settings(), machines)
def test_parts_sum_to_the_whole(setting, machine):
    ranks = per_rank(setting, machine)
    assert [memory.pp_coord for memory in ranks] == list(range(setting.mesh.pp))
    for memory in ranks:
        assert tuple(memory.parts) == PARTS
        assert all(n >= 0 for n in memory.parts.values()), memory
        assert memory.total == sum(memory.parts.values()) > 0
        assert (memory.host > 0) == (setting.state.offload != "none")
        assert (memory.nvme > 0) == (setting.state.offload_optimizer == "nvme")
        assert (memory.parts["margin"] > 0) == (machine is not None)
        assert memory == peak_of(setting, memory.pp_coord, machine)
    assert fullest(setting, machine).total == max(memory.total for memory in ranks)


@few
@given(settings(), machines, st.sampled_from([2, 4]))
def test_more_shards_never_take_more(setting, machine, times):
    # One data-parallel rank gathers nothing and shares no parameter with another.
    assume(setting.mesh.dp > 1)
    for few, more in zip(
        per_rank(setting, machine),
        per_rank(changed(setting, dp=times * setting.mesh.dp), machine),
        strict=True,
    ):
        assert more.total <= few.total and more.host <= few.host


@few
@given(settings(), machines)
def test_smaller_micro_batch_never_takes_more(setting, machine):
    """But where the larger one's logits are so many that they come in parts, which keeps none."""
    larger = changed(setting, micro_batch=2 * setting.flow.micro_batch)
    vocab = -(-setting.workload.layers[-1].cost.vocab // setting.mesh.tp)
    assume(len({num_chunks(shape_of(s).tokens, vocab) > 1 for s in (setting, larger)}) == 1)
    for small, large in zip(per_rank(setting, machine), per_rank(larger, machine), strict=True):
        assert small.total <= large.total


@few
@given(settings(), machines)
def test_more_recomputation_never_takes_more(setting, machine):
    """But for one layer's attention statistics.

    With a single microbatch in flight "full" holds what it computes again, as "none" does what it
    kept; "selective" has let go of them (4 bytes a head and token) when the MLP goes backward.
    """
    modes = [
        per_rank(changed(setting, recompute=mode), machine) for mode in (FULL, SELECTIVE, NONE)
    ]
    statistics = 4 * 8 * shape_of(setting).tokens * (1.2 if machine else 1)
    for full, selective, none in zip(*modes, strict=True):
        assert selective.total <= none.total and full.total <= none.total
        assert full.total <= selective.total + statistics


@few
@given(
    st.sampled_from([4, 6, 32]),
    st.integers(1, 40),
    st.sampled_from(ORDERS),
    machines,
    st.sampled_from(["fp32", "bf16"]),
    st.sampled_from([NONE, FULL]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 4]),
)
def test_zero3_never_takes_more_than_zero1(dp, m, order, machine, precision, recompute, tp, pp):
    """Where it gathers no further ahead than it must, and a stage is many modules."""
    schedule, stages_per_rank = order
    layers = gpt_of_many_modules()
    setting = new_setting(
        layers,
        512,
        Shape(2, 256),
        m,
        pp=pp,
        dp=dp,
        tp=tp,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        precision=precision,
        recompute=recompute,
        zero_stage=3,
        reduces_once=False,
        buffers=fitted(512 // tp),
    )
    for one, three in zip(
        per_rank(changed(setting, zero_stage=1), machine), per_rank(setting, machine), strict=True
    ):
        assert three.total <= one.total


@cache
def gpt_of_many_modules():
    return gpt(512, 94, vocab_size=1000)


def test_case_in_which_zero3_takes_more_than_zero1():
    """A stage smaller than stage3_max_live_parameters is whole twice as it is fetched ahead."""
    layers = MODELS[256, 6, True]
    small = new_setting(
        layers,
        256,
        Shape(1, 128),
        4,
        dp=4,
        schedule="one_f_one_b",
        reduces_once=False,
        buffers=ZeroConfig(stage=0, reduce_bucket_size=2**16),
    )
    assert fullest(small).total > fullest(changed(small, zero_stage=1)).total
    assert fullest(small).parts["gathered"] >= 2 * small.workload.num_params
    near = changed(small, buffers=fitted(256))
    assert fullest(near).total < fullest(changed(near, zero_stage=1)).total


@pytest.mark.parametrize(
    ("ranks", "microbatches"),
    [
        ((1, 2, 3), (1, 2, 3, 5, 8, 13)),
        pytest.param((1, 2, 3, 4), (1, 2, 3, 4, 5, 7, 8, 12, 13, 26, 29), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", names())
def test_in_flight_equals_that_of_the_program(name, ranks, microbatches):
    """At every moment of the whole list, for stages of any size, and no more than that."""
    for pp in ranks:
        for per_rank_ in (1, 2, 3):
            for m in microbatches:
                if why_not(name, pp, m, per_rank_):
                    continue
                schedule = make_schedule(name, pp, m, per_rank_)
                order = ActionOrder(name, pp, m, per_rank_)
                counts_of_ranks = [in_flight(order, coord) for coord in range(pp)]
                assert tuple(max(map(sum, counts)) for counts in counts_of_ranks) == peak_in_flight(
                    schedule
                )
                for coord, program in enumerate(schedule.programs):
                    stages = stages_on(name, pp, per_rank_)[coord]
                    for sizes in ((1, 1, 1), (9, 3, 1), (1, 3, 9), (2, 5, 3)):
                        weight = dict(zip(stages, sizes, strict=False))
                        change = {Op.F: 1, Op.B: -1, Op.W: -1}
                        steps = (change.get(a.op, 0) * weight[a.stage] for a in program)
                        predicted = max(
                            sum(n * weight[s] for n, s in zip(counts, stages, strict=True))
                            for counts in counts_of_ranks[coord]
                        )
                        assert predicted == max(accumulate(steps)), (pp, m, per_rank_, coord)


@few
@given(settings())
def test_stages_equal_those_of_training(setting):
    shape = shape_of(setting)
    costs = [float(layer.cost(shape).forward_flops) for layer in setting.workload.layers]
    num_stages = setting.mesh.pp * setting.order.stages_per_rank
    cuts = stages_of(model_of(setting.workload.layers), num_stages, setting.workload.seq)
    assert cuts == partition(costs, num_stages)
    assert len(saved_bytes(setting)) == num_stages


def test_model_states_equal_those_of_the_zero_paper():
    """arXiv:1910.02054, section 3.1 and figure 1, in bytes a parameter, with fp32 gradients."""
    layers = MODELS[1024, 14, True]
    base = new_setting(layers, 1024, Shape(1, 128), 1, dp=64, schedule="one_f_one_b")
    n = base.workload.num_params
    expected = {0: (2, 12), 1: (2, 12 / 64), 2: (2, 12 / 64), 3: (2 / 64, 12 / 64)}
    for stage, (weights, optimizer) in expected.items():
        parts = fullest(changed(base, zero_stage=stage)).parts
        assert parts["weights"] == pytest.approx(weights * n, rel=1e-3)
        assert parts["optimizer"] == pytest.approx(optimizer * n, rel=1e-3)


def test_tied_weight_counts_once_on_each_rank_that_holds_it():
    layers = MODELS[256, 6, True]
    copy = 32_000 * 256
    one, two = (
        new_setting(layers, 256, Shape(1, 128), 4, pp=pp, zero_stage=0, precision="bf16")
        for pp in (1, 2)
    )
    whole = sum(memory.parts["weights"] for memory in per_rank(one))
    split = sum(memory.parts["weights"] for memory in per_rank(two))
    assert whole == 2 * one.workload.num_params
    assert split == 2 * (two.workload.num_params + copy)


def power_of_two(num_bytes):
    return 2 ** ceil(log2(num_bytes))


@pytest.mark.parametrize(("zero", "group"), [(3, 10**9), (3, 5_000_000), (2, 10**9)])
def test_page_locked_memory_comes_in_powers_of_two(zero, group):
    """Of what is on the host: gradients, what is on its way, at ZeRO-2 the masters."""
    setting = new_setting(
        MODELS[2048, 31, False],
        2048,
        Shape(1, 1024),
        4,
        dp=32,
        zero_stage=zero,
        precision="bf16",
        offload_optimizer="cpu",
        buffers=ZeroConfig(stage=0, sub_group_size=group),
    )
    share = ceil(setting.workload.num_params / 32)
    largest = 32_000 * 2048
    if zero == 3:
        full, rest = divmod(share, group)
        locked = [4 * share, *[4 * group] * full, 4 * rest]
        others = 8 * share + 4 * share
    else:
        locked = [4 * share, 4 * share, 2 * share, 2 * largest]
        others = 8 * share
    (memory,) = per_rank(setting, A100)
    (on_cpu,) = per_rank(setting)
    assert memory.host == others + sum(map(power_of_two, locked))
    assert on_cpu.host == others + sum(locked) < memory.host < 2 * on_cpu.host


@pytest.mark.parametrize(("seq", "locked"), [(1024, 1024), (1280, 2048)])
def test_activations_on_the_host_come_in_powers_of_two(seq, locked):
    """Each tensor is locked by itself; most have the hidden states' size, or a few times that."""
    layers = MODELS[1024, 14, True]
    setting = new_setting(layers, 1024, Shape(1, seq), 1, zero_stage=0, precision="bf16")
    setting = changed(setting, offload_activations=True)
    saved = sum(x.cost(Shape(1, seq)).saved.bytes(2, fused_norms=True) for x in layers[1:-1])
    (memory,) = per_rank(setting, A100)
    assert memory.host == pytest.approx(saved * locked / seq, rel=1e-3)


def test_full_recomputation_saves_nothing_with_split_backwards():
    """What W needs of a linear layer is its input, and the gradient of what it gave."""
    layers = gpt(64, 6, vocab_size=256, seq=64)
    base = new_setting(layers, 64, Shape(32, 64), 4, pp=2, schedule="zero_bubble", zero_stage=1)
    split = changed(base, recompute=FULL)
    ordinary = changed(base, schedule="gpipe", recompute=FULL)
    assert saved_bytes(split) == saved_bytes(base)
    for held, kept in zip(saved_bytes(split), saved_bytes(ordinary), strict=True):
        assert held > 5 * kept


GB = {
    "gpt2-124m": 24,
    "gpt2-1.5b": 24,
    "gpt3-13b": 80,
    "gpt3-175b": 80,
    "llama-8b": 80,
    "llama-70b": 80,
    "qwen3-0.6b": 80,
    "qwen3-30b-a3b": 80,
    "olmoe-1b-7b": 80,
    "mixtral-8x7b": 80,
    "pythia-70m": 24,
    "pythia-1.4b": 40,
}


@pytest.mark.parametrize("name", GB)
def test_shipped_config_fits_the_gpus_named_in_its_comment(name):
    config = RunConfig.from_json(name)
    sizes = config.mesh
    config = config.resolve(sizes.pp * sizes.dp * sizes.tp)
    memory = fullest(Setting.from_config(config), load("H100-SXM5-80GB"))
    print(f"{name}: {memory.total / 1e9:.1f} GB of {GB[name]}")
    assert memory.total < GB[name] * 1e9


@pytest.mark.parametrize(
    ("stage", "device"),
    [(0, "none"), (1, "none"), (3, "none"), (1, "cpu"), (3, "cpu"), (3, "nvme")],
)
def test_average_takes_four_bytes_for_each_element_of_the_shards(stage, device):
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": device}},
        "parallel3d": {
            "mesh": {"dp": 4},
            "model": {"family": "gpt", "hidden_size": 64, "num_hidden_layers": 2}
            | {"num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 64},
            "data": {"sequence_length": 64, "vocab_size": 512},
            "train": {"steps": 1},
        },
    }
    if device == "nvme":
        raw["zero_optimization"]["offload_optimizer"]["nvme_path"] = "."
    settings = []
    for ema in (None, {"decay": 0.9}):
        raw["parallel3d"]["train"]["ema"] = ema
        settings.append(Setting.from_config(RunConfig.from_dict(raw).resolve(4)))
    (without,), (with_average,) = (per_rank(setting) for setting in settings)
    share = -(-settings[0].workload.num_params // (4 if stage else 1))
    kept = with_average.parts["optimizer"] - without.parts["optimizer"]
    host = with_average.host - without.host
    nvme = with_average.nvme - without.nvme
    places = {"none": kept, "cpu": host, "nvme": nvme}
    # Parameters that DeepSpeed does not shard evenly are padded.
    assert 4 * share <= places.pop(device) <= 4.05 * share
    buffer = 4 * share if device == "nvme" else 0
    assert sum(places.values()) == pytest.approx(buffer, rel=0.05)
