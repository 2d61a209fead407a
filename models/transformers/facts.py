"""The parts of a model of transformers as data that needs no torch (floor 0).

They come from the architecture's own modules on the meta device (`anatomy`). A process that has
loaded torch finds them itself; another one asks a process that it starts, once for each config:
the answer is kept in a file.
"""

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from parallel3d.base.atomic import replace_text
from parallel3d.base.lock import Lock
from parallel3d.model.spec import Init, ParamSpec

ANY_VOCABULARY = 1000
"""Rows of the table with which the parts of a model are found: the true ones may not be known."""
ANATOMY = "parallel3d.models.transformers.anatomy"
HELPER = "parallel3d.models.transformers.helper"


class Unsupported(ValueError):
    """A model of transformers that cannot be trained in stages; the text says why.

    - `field`: the field of its config.json that the reason is about.
    - `remedy`: what the user can do.
    """

    def __init__(
        self, text: str, field: str = "model_type", remedy: str = "use another model"
    ) -> None:
        super().__init__(text)
        self.field = field
        self.remedy = remedy


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that the library's checks and its planner read."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    inner_size: int
    max_position_embeddings: int
    initializer_range: float


class Sparse(NamedTuple):
    """The experts of a layer.

    - `experts`: how many there are; 0 in a dense layer.
    - `choices`: those that each token is sent to.
    - `has_scores`: a router gives the scores of all experts to transformers' balance loss.
    """

    experts: int = 0
    choices: int = 0
    has_scores: bool = False


@dataclass(frozen=True)
class Facts:
    """The layers of a model and their parameters.

    - `embedding`, `blocks`, `head`: the parameters of each layer.
    - `tied`: the name of the output projection's parameter and that of the embedding's table, if
      they are one.
    - `cut`: the share of the layers' parameters that tensor parallelism cuts.
    - `kinds`: for each block the number of the first one that costs the same.
    - `isolates`: attention can stay within documents, and share a sample among ranks.
    - `attention_dropout`: the probability of dropout of scores.
    - `sparse`: the experts of each layer.
    - `balance`: the coefficient of the balance loss that the model adds to the loss; 0: it adds
      none.
    - `unknown`: the fields of the config.json that its class does not have.
    """

    sizes: Sizes
    embedding: tuple[ParamSpec, ...]
    blocks: tuple[tuple[ParamSpec, ...], ...]
    head: tuple[ParamSpec, ...]
    tied: tuple[tuple[str, str], ...]
    cut: float
    kinds: tuple[int, ...]
    isolates: bool
    attention_dropout: float
    sparse: tuple[Sparse, ...]
    balance: float
    unknown: tuple[str, ...]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "Facts":
        """Return the facts of a JSON object that `asdict` has made."""
        return cls(
            sizes=Sizes(**found["sizes"]),
            embedding=_params(found["embedding"]),
            blocks=tuple(_params(block) for block in found["blocks"]),
            head=_params(found["head"]),
            tied=tuple((copy, original) for copy, original in found["tied"]),
            cut=found["cut"],
            kinds=tuple(found["kinds"]),
            isolates=found["isolates"],
            attention_dropout=found["attention_dropout"],
            sparse=tuple(Sparse(*own) for own in found["sparse"]),
            balance=found["balance"],
            unknown=tuple(found["unknown"]),
        )


def _params(found: list[dict[str, Any]]) -> tuple[ParamSpec, ...]:
    specs = []
    for fields in found:
        specs.append(
            ParamSpec(
                **fields
                | {
                    "shape": tuple(fields["shape"]),
                    "cut_over": tuple(fields["cut_over"]),
                    "folded": tuple(fields["folded"]),
                    "init": _init(fields["init"]),
                }
            )
        )
    return tuple(specs)


def _init(fields: dict[str, Any]) -> Init:
    lists = {name: tuple(x) for name, x in fields.items() if isinstance(x, list)}
    return Init(**fields | lists)


@lru_cache(maxsize=64)
def facts_of(config: str) -> Facts:
    """Return the facts of a model; raises Unsupported.

    - `config`: the fields of its config.json, as JSON with sorted keys.
    """
    if "torch" in sys.modules:
        facts: Facts = import_module(ANATOMY).find(config)
        return facts
    kind = json.loads(config).get("model_type")
    found = json.loads(asked(ANATOMY, config, f"reading the parts of {kind} (once)"))
    if "unsupported" in found:
        raise Unsupported(*found["unsupported"])
    return Facts.of(found)


def asked(module: str, request: str, purpose: str) -> str:
    """Return a module's `answer` to a request, from a file if it was asked before.

    - `module`: it may import torch. `purpose`: shown while it works.

    Raises Unsupported if it fails.
    """
    return kept(module, request, partial(_helped, module, request, purpose))


@lru_cache(maxsize=1)
def _state_of_code() -> list[str]:
    """Return what answers depend on: the versions of packages, and the family's own files."""
    digest = blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    versions = [version(name) for name in ("parallel3d", "transformers", "torch")]
    return [*versions, digest.hexdigest()]


def kept(module: str, request: str, find: Callable[[], str]) -> str:
    """Return a module's answer to a request from its file, which `find` fills where it is missing.

    Processes that ask at once wait for the first one.
    """
    asks = json.dumps([module, request, _state_of_code()])
    key = blake2b(asks.encode(), digest_size=16).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "parallel3d/models"
    path = folder / f"{key}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return find()
    if path.exists():
        return path.read_text(encoding="utf-8")
    lock = Lock(path.with_suffix(".lock"))
    lock.wait(lambda: None)
    try:
        if not path.exists():
            replace_text(path, find())
        return path.read_text(encoding="utf-8")
    finally:
        lock.release()


def _helped(module: str, request: str, purpose: str) -> str:
    """Return a module's answer by a process with torch, which stays for what is asked next."""
    print(purpose, file=sys.stderr, flush=True)
    for _ in range(2):  # one that nothing was asked for long has ended
        helper = _helper(os.getpid())
        assert helper.stdin is not None and helper.stdout is not None
        with suppress(BrokenPipeError):
            print(json.dumps([module, request]), file=helper.stdin, flush=True)
        line = helper.stdout.readline()
        if line:
            is_answered, text = json.loads(line)
            if is_answered:
                return str(text)
            raise Unsupported(f"cannot be read ({text})")
        _helper.cache_clear()
    raise Unsupported("cannot be read (the process that reads it was ended)")


@lru_cache(maxsize=1)
def _helper(pid: int) -> subprocess.Popen[str]:
    """Start the process of `helper`; it ends with this one, whose number is `pid`."""
    command = [sys.executable, "-m", HELPER]
    pipe = subprocess.PIPE
    nowhere = subprocess.DEVNULL
    helper = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True)
    atexit.register(helper.communicate)
    return helper
