"""A small config trained on ranks of this machine on the reference's own batches, and compared."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from torch import Tensor

from parallel3d.config import RunConfig
from parallel3d.engine.quirks.nvme import swapping_small_tensors
from parallel3d.mesh.mesh import Mesh
from parallel3d.train.assembly import Assembly, assemble
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import (
    ReferenceErrors,
    microbatches,
    weight_error,
    weight_errors,
    worst,
)
from parallel3d.verify.reference import (
    SEED,
    Batch,
    Course,
    Reference,
    load_model,
    relative,
    train_reference,
)
from parallel3d.verify.shrink import BLOCK

Curves = tuple[list[float], list[float]]  # each step's loss and gradient norm
Differences = tuple[float, float, dict[str, float]]


def batches(config: RunConfig) -> Iterator[Batch]:
    """Tokens, labels and documents of each step's global batch, [batch, seq] each.

    Without isolation there are no documents. The same for every mesh of one global batch size.
    """
    length = config.data.sequence_length
    vocab = int(config.model.vocab_size)
    generator = torch.Generator().manual_seed(7)
    for _ in range(config.num_steps):
        shape = (config.global_batch_size, length + 1)
        text = torch.randint(vocab, shape, generator=generator)
        ends = torch.rand(shape, generator=generator) < 0.2
        documents = (ends.cumsum(-1) - ends.long())[:, :-1]  # an end belongs to what it ends
        isolated = documents if config.data.isolate_documents else None
        yield text[:, :-1], text[:, 1:], isolated


def plain_course(config: RunConfig) -> Course:
    """These batches at one learning rate."""
    steps = list(batches(config))
    return Course(steps, [config.optimizer.params.lr] * len(steps), steps[-1])


def reference_on_batches(config: RunConfig, folder: Path) -> Reference:
    """The reference, trained on these batches."""
    return train_reference(config, folder, plain_course(config))


def measure(config: RunConfig, reference: Reference, timeout: float = 300) -> ReferenceErrors:
    """Run a resolved config on as many ranks as its mesh has, and compare.

    Raises TrainingError if a rank does.
    """
    assert isinstance(config.mesh.dp, int)
    ranks = config.mesh.sizes.ranks
    return errors_of(
        config, run_locally(train_and_compare, ranks, config, reference, timeout=timeout)
    )


def errors_of(config: RunConfig, results: Iterable[Differences]) -> ReferenceErrors:
    """The largest errors of what each rank found."""
    losses, norms, weights = zip(*results, strict=True)
    return ReferenceErrors(worst(losses), worst(norms), weight_error(config, weights))


def number_anew() -> None:
    """Let DeepSpeed number parameters and modules from 0, as in a process that has no engine yet.

    It compares the numbers over dp, whose ranks may have had different stages before.
    """
    deepspeed.zero.Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0


def train_and_compare(rank: int, config: RunConfig, reference: Reference) -> Differences:
    """Train on one rank, and compare with the reference."""
    assert isinstance(config.mesh.dp, int)
    mesh = Mesh(**config.mesh.groups)
    torch.set_num_threads(1)  # tiny products on many threads spend their time waiting
    with swapping_small_tensors(2 * BLOCK):
        parts = assemble(config, mesh, seed=SEED)
        errors = differences(parts, config, train(parts, config, mesh), reference)
    mesh.barrier()
    parts.engine.close()
    return errors


def train_each(rank: int, jobs: Iterable[tuple[RunConfig, Reference]]) -> list[Differences]:
    """Train one after another on one rank, and compare each with its reference."""
    errors = []
    for config, reference in jobs:
        number_anew()
        errors.append(train_and_compare(rank, config, reference))
    return errors


def differences(
    parts: Assembly, config: RunConfig, curves: Curves, reference: Reference
) -> Differences:
    """The largest relative errors of a rank's losses and norms, and those of its weights."""
    losses, norms = curves
    return (
        worst(relative(losses, reference.losses)),
        worst(relative(norms, reference.grad_norms)),
        weight_errors(parts, config, reference),
    )


def train(parts: Assembly, config: RunConfig, mesh: Mesh) -> Curves:
    """Train on the reference's batches: each step's mean loss and gradient norm."""
    losses = []
    norms = []
    for step, batch in enumerate(batches(config)):
        local = parts.executor.run(microbatches(batch, config, mesh), step)
        everyone = mesh.messages.gather_floats([local])
        # Every tp rank of the last stage reports the same loss.
        losses.append(sum(row[0] for row in everyone) / (mesh.replicas.size * mesh.tensor.size))
        norms.append(parts.engine.step(config.optimizer.params.lr).grad_norm)
    return losses, norms


def losses_of(
    config: RunConfig, weights: Mapping[str, Tensor], tokens: Tensor, labels: Tensor
) -> Tensor:
    """Return the reference's loss of each token under uncut weights, [batch, seq], in fp64."""
    model, _ = load_model(config, weights)
    with torch.no_grad():
        logits = model.eval()(tokens, use_cache=False).logits
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
