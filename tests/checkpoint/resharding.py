"""Saves the training state of one mesh and loads it on others, and compares bit by bit.

The reference knows nothing of our format: it is what DeepSpeed's own getters gather on the source,
and the same getters are asked on the target.
"""

import zlib
from contextlib import nullcontext
from dataclasses import dataclass

import deepspeed
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from safetensors.torch import load_file, save_file

from parallel3d.checkpoint.find import find_named
from parallel3d.checkpoint.load import load
from parallel3d.checkpoint.manifest import verify
from parallel3d.checkpoint.on_disk import DiskPlace
from parallel3d.checkpoint.save import Saver
from parallel3d.model import optimizers
from parallel3d.models import layers
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import microbatches
from tests.cases import Case, Trainer
from tests.meshes import sizes_of
from tests.models.architectures import small_config
from tests.models.every_decoder import without_measuring
from tests.models.families import small
from tests.verify.measuring import number_anew

STEPS = 2  # so that the moments are of several gradients
MUON = {"optimizer": {"type": "muon", "params": {"lr": 3e-3}}}


def _sizes(family, **sizes):
    return small(family, **sizes).model_dump(mode="json")


MODELS = {
    "gpt": {"num_hidden_layers": 2},
    "shallow": {"num_hidden_layers": 1},
    # Room for two stages on each of two ranks.
    "deep": _sizes("gpt", num_hidden_layers=4),
    "wide": _sizes("gpt", hidden_size=512, num_hidden_layers=1),
    # Fewer key/value heads than four tp ranks, so that some ranks hold the same ones.
    "llama": _sizes("llama", num_key_value_heads=2, num_hidden_layers=3),
    "moe": _sizes("moe", num_experts=4, router="sigmoid", score_bias=True),
    "gpt_neox": {
        "family": "transformers",
        "config": small_config("gpt_neox"),
        "vocab_size": 260,
    },
}
BATCH = 16


@dataclass(frozen=True)
class Side:
    """Where a state is saved or loaded: a mesh and how its training state is kept."""

    mesh: tuple[int, int, int]
    zero: int = 3
    offload: str = "none"
    tied: bool = True
    model: str = "gpt"
    schedule: str = "gpipe"
    stages_per_rank: int = 1
    sequence_parallel: bool = False
    precision: str = "fp32"
    thresholds: bool = False  # DeepSpeed's own, under which small parameters stay gathered
    muon: bool = False  # in place of AdamW
    ep: int = 1
    shards: int | None = None

    @property
    def world_size(self):
        return sizes_of(self.mesh).ranks

    @property
    def microbatches(self):
        """Return the fewest that the schedule takes: more add nothing to a state."""
        return 1 if self.schedule == "gpipe" else 2

    @property
    def weights(self):
        """Return the fields that two sides must have in common."""
        return self.model, self.tied, self.muon

    def __str__(self):
        words = ["x".join(map(str, self.mesh)), f"zero{self.zero}"]
        if self.offload != "none":
            words.append(self.offload)
        words.append("tied" if self.tied else "untied")
        if self.model != "gpt":
            words.append(self.model)
        if self.schedule != "gpipe":
            words.append(self.schedule)
        if self.precision != "fp32":
            words.append(self.precision)
        if self.sequence_parallel:
            words.append("sp")
        if self.thresholds:
            words.append("thresholds")
        if self.muon:
            words.append("muon")
        if self.ep > 1:
            words.append(f"ep{self.ep}")
        if self.shards:
            words.append(f"shards{self.shards}")
        return "-".join(words)


class Trained(Trainer):
    """The parts of a run on one side."""

    def __init__(self, side, folder):
        self.side = side
        number_anew()
        super().__init__(
            Case(
                mesh=side.mesh,
                zero_stage=side.zero,
                offload=side.offload,
                folder=str(folder),
                tied=side.tied,
                schedule=side.schedule,
                stages_per_rank=side.stages_per_rank,
                reduction="auto",
                sequence_parallel=side.sequence_parallel,
                precision=side.precision,
                microbatches=side.microbatches,
                batch=BATCH,
                thresholds=side.thresholds,
                model=MODELS[side.model],
                changes={
                    "parallel3d.mesh.ep": side.ep,
                    "parallel3d.mesh.dp_shards": side.shards,
                    "parallel3d.train.ema": {"decay": 0.5},
                }
                | (MUON if side.muon else {}),
            )
        )

    def train(self, steps=STEPS):
        """Train on data of this side's own, so that no two sides come to the same numbers."""
        generator = torch.Generator().manual_seed(zlib.crc32(str(self.side).encode()))
        for step in range(steps):
            size = self.config.model.vocab_size
            text = torch.randint(size, (BATCH, 17), generator=generator)
            batch = text[:, :-1], text[:, 1:], None
            self.executor.run(microbatches(batch, self.config, self.mesh), step)
            self.engine.step(3e-3)

    def gathered(self):
        """This tp rank's part of every master, moment and average, with its name, copy and cut."""
        self._link_moments()
        for held in self.engine.held:
            values = {"master": self.engine.full_parameter(held)}
            file = self.engine.settings.optimizer.type
            for kind in optimizers.kinds(file, held.spec.role, has_ema=True)[1:]:
                moment = safe_get_full_optimizer_state(held.parameter, kind)
                values[kind] = moment.detach().reshape(held.cut.local_shape)
            yield held.name, held.copy, held.cut, {k: v.cpu().clone() for k, v in values.items()}

    def _link_moments(self):
        """At ZeRO-1 and 2 DeepSpeed's getters see the moments of its first group of parameters
        from its first step on, and the others' never; let them see all."""
        optimizer = self.engine.deepspeed.optimizer
        if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()

    def weights(self):
        """What forward uses, by name: this tp rank's part, whole."""
        for held in self.engine.held:
            sharded = hasattr(held.parameter, "ds_id")
            whole = (
                deepspeed.zero.GatheredParameters([held.parameter]) if sharded else nullcontext()
            )
            with whole:
                yield held.name, held.parameter.detach().cpu().clone()


def state(step):
    """What a run adds to the state in a checkpoint of this step."""
    numbers = {"step": step, "tokens": 0, "next_sample": 0}
    return numbers | {name: {} for name in ("config", "mesh", "corpus", "tokenizer")}


def save_on_rank(rank, sides, root):
    """Train and save on each side in turn; what was gathered there on one rank of each part."""
    everything = []
    for number, side in enumerate(sides):
        trained = Trained(side, root)
        trained.train()
        parts = list(trained.gathered())
        everything.append(parts if trained.mesh.expert_replicas.coord == 0 else [])
        saver = Saver(
            trained.engine,
            trained.mesh,
            layers(trained.config.model),
            [DiskPlace(trained.mesh, root / str(side))],
            asynchronous=number % 2 == 0,
        )
        saver.save(state(STEPS) | ({"config": MUON} if side.muon else {}))
        saver.require_saved()
        trained.mesh.barrier()
        trained.engine.close()
    return everything


def save(sides, root, timeout=200):
    """Save on each of the sides, with a reference of whole tensors; return the sides."""
    for world_size in sorted({side.world_size for side in sides}):
        mine = [side for side in sides if side.world_size == world_size]
        ranks = run_locally(save_on_rank, world_size, mine, root, timeout=timeout)
        for side, parts in zip(mine, zip(*ranks, strict=True), strict=True):
            assert verify(root / str(side) / f"step-{STEPS}") == []
            save_file(
                whole(part for some in parts for part in some),
                root / str(side) / "reference.safetensors",
            )
    return sides


def whole(parts):
    """Whole tensors, from the parts that tensor and pipeline parallel ranks hold."""
    tensors = {}
    for name, copy, cut, values in parts:
        name = "embedding.token.weight" if copy else name
        for kind, value in values.items():
            empty = torch.full(cut.global_shape, torch.nan)
            place = tensors.setdefault(f"{name}|{kind}", empty)
            place = cut.part_of(place)
            missing = bool(place.isnan().all())
            assert missing or torch.equal(place, value), f"the ranks differ in {name}'s {kind}"
            place.copy_(value)
    for key, tensor in tensors.items():
        assert not tensor.isnan().any(), key
    return tensors


def load_on_rank(rank, cases, root):
    """Build each target in turn and load all its sources into it, one after the other.

    For each target and source: what is wrong, in words, and how many elements were compared.
    """
    everything = []
    for target, sources in cases:
        with without_measuring():
            trained = Trained(target, root)
        results = []
        if target.thresholds:
            trained.train(1)  # so that some parameters are gathered, of the old shards
        for source in sources:
            folder = root / str(source)
            checkpoint = find_named(folder, str(folder / f"step-{STEPS}"), trained.mesh)
            model = layers(trained.config.model)
            load(checkpoint, engine=trained.engine, mesh=trained.mesh, layers=model)
            results.append(differences(trained, load_file(folder / "reference.safetensors")))
        everything.append(results)
        trained.mesh.barrier()
        trained.engine.close()
    return everything


def load_all(cases, root, timeout=200):
    """Load on each target, given with its sources; return the faults by (source, target)."""
    faults = {}
    for world_size in sorted({target.world_size for target, _ in cases}):
        mine = [(target, sources) for target, sources in cases if target.world_size == world_size]
        ranks = run_locally(load_on_rank, world_size, mine, root, timeout=timeout)
        for (target, sources), results in zip(mine, zip(*ranks, strict=True), strict=True):
            for source, by_rank in zip(sources, zip(*results, strict=True), strict=True):
                assert all(compared > 0 for _, compared in by_rank)
                faults[source, target] = []
                for rank, (wrong, _) in enumerate(by_rank):
                    faults[source, target] += [f"rank {rank}: {text}" for text in wrong]
    return faults


def differences(trained, reference):
    """What is not bit-equal to the reference, in words; the elements that were compared."""
    wrong = []
    compared = 0
    dtype = trained.engine.settings.dtype
    masters = {}
    for name, copy, cut, values in trained.gathered():
        for kind, value in values.items():
            own = "embedding.token.weight" if copy else name
            if f"{own}|{kind}" not in reference:  # an average begins at the weights
                assert kind == "ema", (own, kind)
                kind = "master"
            expected = cut.part_of(reference[f"{own}|{kind}"])
            compared += value.numel()
            if count := differing(value, expected):
                wrong.append(f"{name}'s {kind}: {count} of {value.numel()} elements")
            if kind == "master":
                masters[name] = expected
    for name, value in trained.weights():
        if count := differing(value, masters.pop(name).to(dtype)):
            wrong.append(f"what forward uses of {name}: {count} of {value.numel()} elements")
    assert not masters
    steps = trained.engine.states.counters()["optimizer_steps"]
    return wrong + ([f"{steps} optimizer steps"] if steps != STEPS else []), compared


def differing(a, b):
    """How many elements differ in a bit."""
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    integers = torch.int32 if a.dtype == torch.float32 else torch.int16
    return int((a.contiguous().view(integers) != b.contiguous().view(integers)).sum())
