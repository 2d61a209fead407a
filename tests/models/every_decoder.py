"""Every causal language model of transformers, tried: those that train equal to one process.

`python -m tests.models.every_decoder > docs/architectures.json` writes the results, of which
`python docs/architectures_page.py > docs/architectures.md` makes the page. Names as arguments are
tried alone. It takes a quarter of an hour on two free cores.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from parallel3d.base.errors import ConfigError, TrainingError
from parallel3d.config import RunConfig
from parallel3d.model.spec import LayerCost
from parallel3d.models.transformers import spec
from parallel3d.models.transformers.facts import Facts
from parallel3d.models.transformers.spec import Config, MeasuredLayer
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import ReferenceErrors
from parallel3d.verify.reference import (
    Reference,
    first_weights,
    load_model,
    relative,
    train_model,
)
from tests.cases import Case
from tests.models.architectures import LAYERS, VOCABULARY, small_config
from tests.verify.measuring import Differences, errors_of, plain_course, train_each

STDS = (0.02, 0.2)
BOUND = 1e-5
TOGETHER = 14  # architectures on ranks that are started once; if one crashes, each is tried alone
# Their recurrences are loops over tokens without the packages that they are written for.
SLOW = ("bailing_hybrid", "falcon_h1", "kimi_linear")


def case_of(
    kind: str, std: float, mesh: tuple[int, int, int], layers: int = LAYERS, **settings: Any
) -> Case:
    """Return a run of a small model of an architecture."""
    model = {
        "family": "transformers",
        "config": small_config(kind, std, layers),
        "vocab_size": VOCABULARY,
    }
    return Case(model=model, mesh=mesh, **{"batch": 8, "microbatches": 2} | settings)


def train_cheaply(
    rank: int,
    jobs: Iterable[tuple[RunConfig, Reference]],
    known: Mapping[str, Facts] = MappingProxyType({}),
) -> list[Differences]:
    """Train one after another; blocks are placed as if all cost the same.

    `known` are facts that this rank need not look for, by the fields of their config.json.
    """
    find = spec.facts_of

    def facts_of(fields: str) -> Facts:
        return known[fields] if fields in known else find(fields)

    with without_measuring(), patch.object(spec, "facts_of", facts_of):
        return train_each(rank, jobs)


@contextmanager
def without_measuring() -> Iterator[None]:
    """All blocks cost the same."""
    with patch.object(MeasuredLayer, "__call__", lambda *_: LayerCost(10**9)):
        yield


def errors_on_ranks(cases: Sequence[Case]) -> list[ReferenceErrors]:
    """Each case's errors; all have the same mesh, and train one after another on its ranks."""
    jobs = [(case.config, case.reference) for case in cases]
    known = {}
    for config, _ in jobs:
        assert isinstance(config.model, spec.Config)
        known[config.model.json_of_facts] = config.model.facts
    ranks = run_locally(train_cheaply, cases[0].world_size, jobs, known, timeout=3000)
    by_case = zip(*ranks, strict=True)
    return [errors_of(job[0], own) for job, own in zip(jobs, by_case, strict=True)]


def shares_and_refusals(kinds: Iterable[str]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the share that tensor parallelism cuts by architecture, and the others' reasons."""
    shares = {}
    refusals = {}
    for kind in kinds:
        if kind in SLOW:
            refusals[kind] = "was not tried: its recurrence is a loop over tokens here"
            continue
        try:
            case = case_of(kind, 0.02, (1, 1, 1))
            share = Config.model_validate(case.model).facts.cut
            refusal = _uncompared(case)
            if refusal is None:
                shares[kind] = share
            else:
                refusals[kind] = refusal
        except ValidationError as error:
            refusals[kind] = _reason(str(error))
        # Broad: some architectures fail in their own way, already in their config.
        except Exception as error:
            refusals[kind] = f"cannot be built small: {_plain(str(error).splitlines()[-1])}"
    return shares, refusals


def _uncompared(case: Case) -> str | None:
    """Return why there is nothing to compare with; None if transformers' own code runs."""
    try:
        _ = case.reference
    except ConfigError as error:
        if not isinstance(error.__cause__, RuntimeError):
            raise
        return f"was not compared: transformers' own code fails in fp64 ({error.__cause__})"
    return None


def _plain(line: str) -> str:
    """Return a line of an error without pydantic's remarks."""
    return line.partition(" [type=")[0].strip().removeprefix("Value error, ")


def _reason(message: str) -> str:
    """Return what a message says about the architecture, without the remedy at its end."""
    _, quoted, text = message.partition('": ')
    if not quoted:
        return f"cannot be built small: {_plain(message.splitlines()[-2])}"
    return text.splitlines()[0].rpartition("; ")[0]


def mesh_of(share: float) -> tuple[int, int, int]:
    """Return the mesh on which an architecture trains."""
    return (2, 2, 2) if share >= 0.5 else (2, 2, 1)


def errors_by_kind(
    kinds: tuple[str, ...], std: float, mesh: tuple[int, int, int]
) -> Iterator[tuple[str, float]]:
    """Yield each architecture's largest error of loss, norm and weights after two steps.

    It is infinite for those whose ranks failed.
    """
    for first in range(0, len(kinds), TOGETHER):
        some = kinds[first : first + TOGETHER]
        cases = [case_of(kind, std, mesh) for kind in some]
        try:
            measured = errors_on_ranks(cases)
        except TrainingError as error:
            if len(some) > 1:
                for kind in some:
                    yield from errors_by_kind((kind,), std, mesh)
                continue
            print(f"{some[0]}: {error}", file=sys.stderr)
            yield some[0], float("inf")
            continue
        for kind, errors in zip(some, measured, strict=True):
            yield kind, max(errors.loss, errors.grad_norm, errors.weight)


def error_of_plain(case: Case) -> float:
    """Return how far transformers' own model in fp32 is from itself in fp64, in one process."""
    config = case.config
    exact = case.reference
    model, family = load_model(config, first_weights(config), torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        plain = train_model(model.train(), family, config, Path(folder), plain_course(config))
        weights = load_file(plain.weights)
    errors = relative(plain.losses, exact.losses) + relative(plain.grad_norms, exact.grad_norms)
    for name, value in load_file(exact.weights).items():
        errors.append(float((weights[name].double() - value).abs().max()))
    return max(errors)


def results(names: Sequence[str] = ()) -> dict[str, Any]:
    """Try architectures, all unless some are named; return the form of docs/architectures.json."""
    shares, refusals = shares_and_refusals(names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    tried: dict[str, dict[str, Any]] = {}
    for kind, share in shares.items():
        tried[kind] = {"share_cut": round(share, 2), "mesh": mesh_of(share), "errors": {}}
        tried[kind]["plain"] = {}  # those of transformers' own model, where ours are too large
    for mesh in ((2, 2, 2), (2, 2, 1)):
        kinds = tuple(kind for kind, share in shares.items() if mesh_of(share) == mesh)
        for std in STDS:
            for kind, error in errors_by_kind(kinds, std, mesh):
                tried[kind]["errors"][str(std)] = float(f"{error:.2e}")
                if error > BOUND:
                    plain = error_of_plain(case_of(kind, std, (1, 1, 1)))
                    tried[kind]["plain"][str(std)] = float(f"{plain:.1e}")
    return {
        "transformers": version("transformers"),
        "revision": revision(),
        "tried": tried,
        "refused": refusals,
    }


def revision() -> str:
    """Return the commit of this checkout."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    answer = subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
    return answer.stdout.strip()


if __name__ == "__main__":
    print(json.dumps(results(sys.argv[1:]), indent=1))
