"""Trains a small GPT on a mesh of real ranks, and the same by plain PyTorch, and compares."""

import math
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from models import layers
from models.gpt.spec import Config
from parallel3d.engine import Engine, EngineSettings
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import Shape
from parallel3d.pipeline.executor import Executor, Microbatch
from parallel3d.pipeline.stages import build_stages
from parallel3d.schedule.schedules import make_schedule
from parallel3d.tensor.cut import Cut
from parallel3d.tensor.initialise import fill
from tests.ranks import run_ranks
from tests.verify import reference

OPTIMIZER = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip": 0.02}
NO_THRESHOLDS = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


@dataclass(frozen=True)
class Case:
    """One run: a mesh and everything that must not change its numbers."""

    mesh: tuple[int, int, int] = (1, 1, 1)
    schedule: str = "gpipe"
    stages_per_rank: int = 1
    zero_stage: int = 3
    offload: str = "none"
    reduction: str = "per_step"
    checkpointing: str = "none"
    sequence_parallel: bool = False
    tied: bool = True
    microbatches: int = 4
    precision: str = "fp32"
    steps: int = 5
    batch: int = 48  # sequences in a whole step
    thresholds: bool = False  # DeepSpeed's own, which keep a toy model gathered
    model: dict = field(default_factory=dict, hash=False)

    @property
    def world_size(self):
        pp, dp, tp = self.mesh
        return pp * dp * tp

    def __str__(self):
        mesh = "x".join(map(str, self.mesh))
        offload = "+cpu" if self.offload == "cpu" else ""
        return (
            f"{mesh} {self.schedule} zero{self.zero_stage}{offload} {self.reduction} "
            f"ckpt-{self.checkpointing} {'sp ' if self.sequence_parallel else ''}"
            f"{'tied' if self.tied else 'untied'} m{self.microbatches}"
            f"{' ' + self.precision if self.precision != 'fp32' else ''}"
        )


def config_of(case):
    sizes = dict(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, vocab_size=61,
        max_position_embeddings=16,
    )  # fmt: skip
    return Config(family="gpt", tie_word_embeddings=case.tied, **(sizes | case.model))


def batches_of(case, config):
    generator = torch.Generator().manual_seed(7)
    for _ in range(case.steps):
        text = torch.randint(config.vocab_size, (case.batch, 17), generator=generator)
        yield text[:, :-1], text[:, 1:]


def whole_weights(config, seed=0):
    """Every weight, whole, from the seeded start."""
    weights = {}
    for layer in layers(config):
        for spec in layer.own_params:
            name = f"{layer.name}.{spec.name}"
            flat = torch.empty(spec.numel)
            fill(flat, 0, spec, name, Cut(spec.shape, None, 0, 0, 0), seed)
            weights[name] = flat.view(spec.shape)
    return weights


@lru_cache(maxsize=16)
def expected(tied, steps, batch, model):
    case = Case(tied=tied, steps=steps, batch=batch, model=dict(model))
    config = config_of(case)
    torch.set_num_threads(1)
    return reference.train(whole_weights(config), config, list(batches_of(case, config)), OPTIMIZER)


def settings_of(case):
    _, dp, _ = case.mesh
    return EngineSettings(
        micro_batch_size=case.batch // (dp * case.microbatches),
        zero_stage=case.zero_stage,
        offload_optimizer=case.offload,
        precision=case.precision,
        gradient_reduction=case.reduction,
        gradient_clipping=OPTIMIZER["clip"],
        lr=OPTIMIZER["lr"],
        betas=OPTIMIZER["betas"],
        eps=OPTIMIZER["eps"],
        weight_decay=OPTIMIZER["weight_decay"],
        zero_options={} if case.thresholds else NO_THRESHOLDS,
    )


@dataclass
class Trainer:
    """The real parts, put together for one case on this rank."""

    case: Case

    def __post_init__(self):
        case = self.case
        pp, dp, tp = case.mesh
        self.config = config_of(case)
        self.mesh = Mesh(pp, dp, tp)
        schedule = make_schedule(case.schedule, pp, case.microbatches, case.stages_per_rank)
        settings = settings_of(case)
        self.micro = settings.micro_batch_size
        self.stages = build_stages(
            layers(self.config), schedule, settings, mesh=self.mesh, shape=Shape(self.micro, 16),
            activation_checkpointing=case.checkpointing,
            sequence_parallel=case.sequence_parallel,
        )  # fmt: skip
        owners = schedule.pp_coord_of_stage[0], schedule.pp_coord_of_stage[-1]
        self.engine = Engine(
            self.stages.module, self.stages.held, settings, mesh=self.mesh, owners=owners
        )
        seq = 16 // (tp if case.sequence_parallel else 1)
        hidden = (self.micro, seq, self.config.hidden_size)
        self.executor = Executor(
            schedule, self.mesh, self.engine, key=self.stages.key, hidden_shape=hidden
        )

    def microbatches(self, tokens, labels):
        """This dp coordinate's share of a batch."""
        share = tokens.shape[0] // self.mesh.size("dp")
        start = share * self.mesh.coord("dp")
        tokens, labels = (t[start : start + share].split(self.micro) for t in (tokens, labels))
        device = self.mesh.device
        return [Microbatch(x.to(device), y.to(device)) for x, y in zip(tokens, labels, strict=True)]

    def run(self, lr=OPTIMIZER["lr"]):
        """Losses and gradient norms of every step."""
        losses, norms = [], []
        for step, (tokens, labels) in enumerate(batches_of(self.case, self.config)):
            local = self.executor.run(self.microbatches(tokens, labels), step)
            everyone = self.mesh.gather_floats([local])
            # Every tp rank of the last stage reports the same loss.
            replicas = self.mesh.size("dp") * self.mesh.size("tp")
            losses.append(sum(row[0] for row in everyone) / replicas)
            norms.append(self.engine.step(lr).grad_norm)
        return losses, norms

    def weights(self):
        """This rank's part of every weight: name, cut, value."""
        return [
            (h.name, h.cut, h.copy, self.engine.full_parameter(h).cpu()) for h in self.engine.held
        ]


def train_on_rank(rank, case):
    trainer = Trainer(case)
    losses, norms = trainer.run()
    return losses, norms, trainer.weights()


@dataclass(frozen=True)
class Errors:
    """The largest differences from plain PyTorch: relative, relative, absolute."""

    loss: float
    grad_norm: float
    weight: float

    def within(self, tolerance=1e-5):
        return max(self.loss, self.grad_norm, self.weight) <= tolerance

    def __str__(self):
        return f"loss {self.loss:.1e}  norm {self.grad_norm:.1e}  weights {self.weight:.1e}"


def compare(case, results):
    """The largest differences between what the ranks returned and plain PyTorch."""
    losses, norms, weights = expected(
        case.tied, case.steps, case.batch, tuple(sorted(case.model.items()))
    )
    loss, norm, weight = [0.0], [0.0], [0.0]
    for rank_losses, rank_norms, held in results:
        for got, want in zip(rank_losses, losses, strict=True):
            loss.append(abs(got - want) / abs(want))
        for got, want in zip(rank_norms, norms, strict=True):
            norm.append(abs(got - want) / abs(want))
        for name, cut, copy, value in held:
            whole = weights["embedding.token.weight" if copy else name]
            if cut.dim is not None:
                whole = whole.narrow(cut.dim, cut.start, cut.stop - cut.start)
            weight.append(float((value - whole).abs().max()))
    return Errors(*(_worst(errors) for errors in (loss, norm, weight)))


def _worst(errors):
    """The largest; a NaN is larger than anything, although max() does not say so."""
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def measure(case, timeout=120):
    """Run a case on real ranks and compare it."""
    return compare(case, run_ranks(train_on_rank, case.world_size, case, timeout=timeout))
