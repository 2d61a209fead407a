"""Small GPTs on meshes of real ranks, with what tests vary; `verify` trains and compares them."""

import atexit
import json
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from unittest.mock import patch

import pytest
import torch
from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_param_swapper

from parallel3d.config import RunConfig
from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline import stages
from parallel3d.tensor.random_key import seed_of
from parallel3d.train.assembly import assemble
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import microbatches
from parallel3d.verify.reference import SEED
from parallel3d.verify.shrink import BLOCK, NO_THRESHOLDS
from tests.meshes import sizes_of
from tests.verify.measuring import batches, differences, errors_of, reference_on_batches, train

GPT = {
    "family": "gpt",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 16,
}
# DeepSpeed is pinned: what it does without a remedy changes with the pin alone. Run these with
# `-m slow` before the pin moves.
unpatched = pytest.mark.slow
ADAM = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
TO_NVME = {
    "offload_optimizer": {"buffer_count": 4},
    "offload_param": {"max_in_cpu": 0, "buffer_size": 8192, "buffer_count": 5},
}


@dataclass(frozen=True)
class Case:
    """One run: a mesh and everything that must not change its numbers."""

    mesh: tuple[int, int, int] = (1, 1, 1)
    schedule: str = "gpipe"
    stages_per_rank: int = 1
    zero_stage: int = 3
    offload: str = "none"  # "cpu", "nvme", "param-cpu", "param-nvme", or two joined by "+"
    folder: str = ""  # for what is offloaded to NVMe
    reduction: str = "per_step"
    weights: str = "per_microbatch"
    checkpointing: str = "none"
    sequence_parallel: bool = False
    tied: bool = True
    microbatches: int = 4
    precision: str = "fp32"
    steps: int = 2
    batch: int = 24  # sequences in a whole step
    thresholds: bool = False  # DeepSpeed's own, which keep a toy model gathered
    model: dict = field(default_factory=dict, hash=False)
    changes: dict = field(
        default_factory=dict, hash=False
    )  # settings of the config, by dotted keys

    @property
    def world_size(self):
        return sizes_of(self.mesh).ranks

    def __str__(self):
        mesh = "x".join(map(str, self.mesh))
        offload = "" if self.offload == "none" else f"+{self.offload}"
        return (
            f"{mesh} {self.schedule} zero{self.zero_stage}{offload} {self.reduction} "
            f"{'' if self.weights == 'per_microbatch' else f'weights-{self.weights} '}"
            f"ckpt-{self.checkpointing} {'sp ' if self.sequence_parallel else ''}"
            f"{'tied' if self.tied else 'untied'} m{self.microbatches}"
            f"{' ' + self.precision if self.precision != 'fp32' else ''}"
        )

    @cached_property
    def config(self):
        """The complete config of this run."""
        sizes = sizes_of(self.mesh)
        block = {
            "mesh": sizes._asdict() | {"sequence_parallel": self.sequence_parallel},
            "pipeline": {
                "schedule": self.schedule,
                "stages_per_rank": self.stages_per_rank,
                "gradient_reduction": self.reduction,
                "weights": self.weights,
                "activation_checkpointing": self.checkpointing,
            },
            "model": self._model(),
            "data": {"sequence_length": 16, "tokenizer": "somebody's"},
            "train": {"steps": self.steps},
        }
        raw = {
            "train_micro_batch_size_per_gpu": self.batch // (sizes.dp * self.microbatches),
            "gradient_accumulation_steps": self.microbatches,
            "gradient_clipping": 0.02,
            "optimizer": {"type": "AdamW", "params": dict(ADAM)},
            "zero_optimization": self._zero(),
            "aio": {"block_size": BLOCK},
            "parallel3d": block,
        } | ({} if self.precision == "fp32" else {self.precision: {"enabled": True}})
        for key, value in self.changes.items():
            *sections, name = key.split(".")
            section = raw
            for part in sections:
                section = section.setdefault(part, {})
            section[name] = value
        return RunConfig.from_dict(raw).resolve(self.world_size).completed()

    def _model(self):
        if self.model.get("family") == "transformers":
            return self.model
        return GPT | {"tie_word_embeddings": self.tied} | self.model

    def _zero(self):
        zero = {"stage": self.zero_stage} | ({} if self.thresholds else NO_THRESHOLDS)
        for kind in self.offload.split("+"):
            name = "offload_param" if kind.startswith("param-") else "offload_optimizer"
            device = kind.removeprefix("param-")
            zero[name] = {"device": device}
            if device == "nvme":
                zero[name] |= {"nvme_path": self.folder} | TO_NVME[name]
        return zero

    @property
    def reference(self):
        """The same training by plain transformers."""
        config = self.config
        kept = config.model, config.optimizer, config.data
        numbers = config.global_batch_size, config.train.steps, config.gradient_clipping
        key = json.dumps(
            [*(section.model_dump(mode="json") for section in kept), numbers, self.precision]
        )
        if key not in _REFERENCES:
            torch.set_num_threads(1)
            folder = mkdtemp()
            atexit.register(rmtree, folder)
            _REFERENCES[key] = reference_on_batches(config, Path(folder))
        return _REFERENCES[key]


_REFERENCES = {}


@contextmanager
def any_weights():
    """Draw each part of a weight at once, where neither a reference nor another mesh has it.

    They are drawn in many small tiles otherwise, a tenth of a short run's time.
    """

    def draw(out, start, spec, name, cut, seed):
        stop = min(start + out.numel(), prod(cut.local_shape))
        generator = torch.Generator().manual_seed(seed_of(f"{seed}/{name}/{cut.bounds}/{start}"))
        out[: max(0, stop - start)].normal_(spec.init.value, spec.init.std, generator=generator)

    with patch.object(stages, "fill", draw):
        yield


class Trainer:
    """The parts of a run, put together for one case on this rank."""

    def __init__(self, case):
        self.case = case
        self.config = case.config
        self.mesh = Mesh(**self.config.mesh.groups)
        if "nvme" in case.offload:  # DeepSpeed keeps tensors below 1 MiB in memory
            for module in (optimizer_utils, partitioned_param_swapper):
                module.MIN_AIO_BYTES = 2 * BLOCK
        self.parts = assemble(self.config, self.mesh, seed=SEED)
        self.engine = self.parts.engine
        self.stages = self.parts.stages
        self.executor = self.parts.executor
        self.evaluator = self.parts.evaluator
        self.lr = self.config.optimizer.params.lr

    def batches(self):
        """This dp coordinate's microbatches of each step."""
        return [microbatches(batch, self.config, self.mesh) for batch in batches(self.config)]

    def run(self):
        """Losses and gradient norms of every step."""
        return train(self.parts, self.config, self.mesh)

    def compare(self, reference):
        """Train, and give what `errors_of` takes from each rank."""
        return differences(self.parts, self.config, self.run(), reference)

    def weights(self):
        """This rank's part of every weight: name, cut, whether it is a tied copy, value."""
        return [
            (h.name, h.cut, h.copy, self.engine.full_parameter(h).cpu()) for h in self.engine.held
        ]

    def close(self):
        self.mesh.barrier()
        self.engine.close()


def train_on_rank(rank, case, fault=nullcontext):
    """Losses, gradient norms and this rank's weights, under a planted fault."""
    with fault():
        trainer = Trainer(case)
        result = *trainer.run(), trainer.weights()
        trainer.close()
    return result


def compare_on_rank(rank, case, reference, fault=nullcontext):
    """What `errors_of` takes from each rank, under a planted fault."""
    with fault():
        trainer = Trainer(case)
        deviations = trainer.compare(reference)
        trainer.close()
    return deviations


def measure(case, fault=nullcontext, run=run_locally, **options):
    """The largest differences of a case, under a planted fault, from plain transformers."""
    deviations = run(compare_on_rank, case.world_size, case, case.reference, fault, **options)
    return errors_of(case.config, deviations)
