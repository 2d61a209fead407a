"""Tasks of the library lm_eval: read before anything is built, and evaluated on a mesh."""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.config.group import GroupConfig
from lm_eval.config.task import TaskConfig
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from parallel3d.base.errors import ConfigError, Parallel3DError, TrainingError, first_line
from parallel3d.extras.tasks.scorer import Interrupted, Request, Scorer

# Keys of a task file besides the fields of a task.
_STRUCTURE = {"include", "class", "tag", "group", "task_list"}
_TYPES = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")
FEWSHOT_SEED = 1234
"""The seed with which lm_eval chooses examples."""
DRAWS = 1000
"""Draws of a bootstrap, for standard errors that have no closed form."""


class MeshLM(TemplateLM):  # type: ignore[misc]  # lm_eval may not be installed
    """A language model of lm_eval whose log-likelihoods a mesh computes; for rank 0."""

    def __init__(self, scorer: Scorer, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._scorer = scorer

    @property
    def eot_token_id(self) -> int:
        """The id of the end-of-text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The id that stands before a text without a context, as lm_eval's own models have it."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text, with the tokenizer's special tokens unless it has them."""
        options = {}
        if add_special_tokens is None and string.startswith(
            self.tokenizer.decode(self.prefix_token_id)
        ):
            add_special_tokens = False
        if add_special_tokens is not None:
            options["add_special_tokens"] = add_special_tokens
        ids: list[int] = self.tokenizer.encode(string, **options)
        return ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        longest = self._scorer.longest
        cut = []
        for _, context, continuation in requests:
            if len(continuation) > longest:
                raise ConfigError(
                    f"a continuation has {len(continuation):,} tokens, more than"
                    f" parallel3d.data.sequence_length = {longest}; raise it, up to the model's"
                    " max_position_embeddings, or use a task with shorter continuations"
                )
            # A context that is too long loses its beginning.
            cut.append(Request((context + continuation)[-longest - 1 :], len(continuation)))
        return [(score.log_likelihood, score.is_greedy) for score in self._scorer.lead(cut)]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, in windows of the model's context."""
        windows = []
        owners = []
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in utils.get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self._scorer.longest, 1
            ):
                windows.append((None, *utils.make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += value
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Refuse: a mesh does not generate."""
        raise ConfigError(
            f"the task generates text, which a mesh does not; use a task of {', '.join(_TYPES)}"
        )


def load_tasks(names: Sequence[str]) -> dict[str, Any]:
    """Return lm_eval's tasks of these names and files, with their data.

    Raises ConfigError for a file with an unknown field, a name that is not known, a task whose data
    cannot be loaded, and one that needs generated text.
    """
    specs: list[Any] = [_read_file(name) if _is_file(name) else name for name in names]
    # To read the library's own tasks, of which there are thousands, takes seconds.
    needs_library = any(isinstance(spec, str) or "group" in spec for spec in specs)
    with _quiet():
        manager = TaskManager(include_defaults=needs_library)
        loaded: dict[str, Any] = {}
        for name, spec in zip(names, specs, strict=True):
            try:
                part = manager.load([spec])
            # Broad: tasks may be programs, and `datasets` passes on any error.
            except Exception as error:
                raise ConfigError(
                    f"--tasks: {name}: cannot be loaded ({first_line(error)}); name a task of"
                    " lm_eval whose data this machine has, or a YAML file"
                ) from error
            for kind, entries in part.items():
                loaded.setdefault(kind, {}).update(entries)
    for name, task in loaded["tasks"].items():
        kind = task.get_config("output_type") or task.OUTPUT_TYPE
        if kind not in _TYPES:
            raise ConfigError(
                f"--tasks: {name}: has output_type {kind}, which generates text; use a task of"
                f" {', '.join(_TYPES)}"
            )
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return loaded


def score(
    tasks: dict[str, Any], scorer: Scorer, tokenizer: Any
) -> dict[str, dict[str, float]] | None:
    """Return the scores of tasks, on rank 0 while the other ranks follow the scorer.

    Returns None after a request to stop. An error that is of this rank alone ends the others'
    following; raises TrainingError for those of lm_eval.
    """
    try:
        with _quiet():
            results = evaluate(
                MeshLM(scorer, tokenizer), tasks, bootstrap_iters=DRAWS, log_samples=False
            )
    except Interrupted:
        return None
    except Exception as error:
        if scorer.is_computing:
            raise
        scorer.end()
        if isinstance(error, Parallel3DError):
            raise
        raise TrainingError(f"lm_eval failed: {first_line(error)}") from error
    scorer.end()
    return {name: dict(_numbers(own)) for name, own in results["results"].items()}


def _numbers(result: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Yield the metrics of a task; the name has the filter unless it is "none", then _stderr."""
    for key, value in result.items():
        base, _, kept = key.partition(",")
        if kept and isinstance(value, int | float):
            name = base.removesuffix("_stderr")
            end = base.removeprefix(name)
            yield (f"{name}{end}" if kept == "none" else f"{name}.{kept}{end}"), float(value)


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _read_file(name: str) -> dict[str, Any]:
    """Return the content of a task file; raise ConfigError if it has unknown fields."""
    path = Path(name)
    try:
        # Without its functions, which may be anything.
        plain = load_yaml(path, resolve_func=False)
    except Exception as error:
        raise ConfigError(
            f"--tasks: {name}: cannot be read ({first_line(error)}); use a task file of lm_eval"
        ) from error
    own = fields(GroupConfig) if "group" in plain else ()
    known = {field.name for field in (*fields(TaskConfig), *own)} | _STRUCTURE
    for key in plain:
        if key not in known:
            near = get_close_matches(str(key), known, 1)
            remedy = f"did you mean {near[0]}?" if near else "remove it"
            raise ConfigError(f"--tasks: {name}: {key}: is not a field of a task; {remedy}")
    if "task" not in plain and "group" not in plain:
        raise ConfigError(f"--tasks: {name}: task: is missing; name the task")
    content: dict[str, Any] = load_yaml(path)
    options = content.get("dataset_kwargs")
    if isinstance(options, dict) and "data_files" in options:
        options["data_files"] = _beside(options["data_files"], path.resolve().parent)
    return content


def _beside(files: Any, folder: Path) -> Any:
    """Return paths of data files, from the task file's folder on if they are there."""
    if isinstance(files, dict):
        return {split: _beside(own, folder) for split, own in files.items()}
    if isinstance(files, list):
        return [_beside(own, folder) for own in files]
    found = folder / str(files)
    return str(found) if found.exists() else files


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the progress bars of lm_eval off the screen, and its bootstraps in this process."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"  # a forked process would share the ranks' connections
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        del os.environ["DISABLE_MULTIPROC"]
        if before is not None:
            os.environ["DISABLE_MULTIPROC"] = before
