"""Values that fill the blanks of a row; each filled blank is noted on the row."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

from benchmarks.published import programs
from benchmarks.published.architectures import Architecture, found, known, unmodelled
from benchmarks.published.assumptions import SOURCES, program_of, source_of, supplied
from benchmarks.published.cells import UnusableRow, number_in
from parallel3d.config.hardware import Hardware
from parallel3d.models.llama import spec as llama
from parallel3d.plan.setting import Setting, Software

_COLUMNS = {
    "layers": "n_layers",
    "hidden": "hidden",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "ffn": "ffn_hidden",
    "vocab": "vocab",
    "seq": "seq_len",
}
ALIKE = 0.1  # how near the parameters of a family must come to those that a row states, to be it
WRONG = 0.4  # how far they may be: rounded, and with or without embeddings


def described(text: str, place: str) -> Software:
    """The program called `text`; raises UnusableRow, naming the described ones, if none is."""
    program = programs.named(text)
    if program is None:
        raise UnusableRow(
            f'{place} = "{text}" is not described; write one of: {programs.names(text)}',
            f"{place} is not described: {text}",
        )
    return program


@dataclass
class Filled:
    """The numbers of a row with its blanks filled, and notes on the blanks.

    `assumed`: column -> what a blank was filled with; `notes`: in words.
    """

    numbers: dict[str, Any]
    assumed: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def or_else(self, name: str, stated: Any, default: Any) -> Any:
        """The value that a row states, else its source's, else the default, which is noted."""
        if stated not in (None, ""):
            return stated
        if name not in self.numbers:
            self.numbers[name] = self.assumed[name] = default
        return self.numbers[name]

    def program(self, cells: Mapping[str, str], default: Software | None) -> Software:
        """The program that a row ran, by its cell, its source or --program; raises UnusableRow."""
        source = cells["source_id"]
        if cells["program"]:
            return described(cells["program"], "program")
        if source in SOURCES:
            default = program_of(source, cells)
        if default is None:
            raise UnusableRow(
                f'the program that ran "{source}" is not stated; fill the column program, or give '
                f"--program, with one of: {programs.names()}",
                "the program is not stated; fill the column program, or give --program NAME",
                ["program"],
            )
        self.assumed["program"] = default.name
        return default

    def by_source(self, cells: Mapping[str, str]) -> None:
        """Fill the blanks of a row that its source's documents, scripts or rules supply."""
        source = cells["source_id"]
        for name, value in {**source_of(source).blanks, **_supplied(source, cells)}.items():
            if not cells.get(name, ""):
                self.numbers[name] = self.assumed[name] = value
                self.notes.append(f"{name} = {value}")

    def model(self, cells: Mapping[str, str]) -> Architecture:
        """The sizes of a row's model, its blanks filled by the model's name; raises UnusableRow."""
        name = cells["model_name"]
        if kind := unmodelled(name):
            raise UnusableRow(f"{name} is {kind}, which is not modelled", f"{kind} is not modelled")
        sizes: dict[str, Any] = {
            field: self.numbers.get(column) for field, column in _COLUMNS.items()
        }
        given = Architecture(**sizes, tied=self.numbers.get("tied"))
        in_table = cells["source_id"] in SOURCES
        looked_up = known(name) if in_table else self._looked_up(given, name)
        vocab = self._vocabulary(given.vocab, cells)
        model = replace(given, vocab=vocab).filled(looked_up)
        if model.vocab is None and cells["vocab"]:
            raise UnusableRow(
                f'vocab = "{cells["vocab"]}" is in words, and neither they nor "{name}" have '
                "a known vocabulary; write the number of its entries",
                "vocab is in words that are not known",
                ["vocab"],
            )
        if model.missing:
            raise UnusableRow(
                f"no {', '.join(model.missing)}: the architecture of {name} is not known; fill "
                f"{', '.join(_COLUMNS[size] for size in model.missing)}",
                "the architecture of the model is not known",
                [_COLUMNS[size] for size in model.missing],
            )
        self._check(model)
        blank = [f for f in _COLUMNS if getattr(given, f) is None and getattr(model, f) is not None]
        if blank:
            self.notes.append(f"{', '.join(blank)} from the model's published config")
        self.assumed |= {_COLUMNS[f]: getattr(model, f) for f in blank}
        self._by_family(model)
        dropout = self.numbers.get("dropout", 0.0)
        model = replace(model, kv_heads=model.kv_heads or model.heads, dropout=dropout)
        if not in_table:
            self._compare(model, name)
        return model

    def _looked_up(self, given: Architecture, name: str) -> Architecture:
        """The named model's sizes; of a model of another width only its family's vocabulary."""
        model = found(name) or self._family(given, name)
        for size in ("hidden", "heads", "kv_heads", "ffn"):
            stated = getattr(given, size)
            published = getattr(model, size)
            if None not in (stated, published) and stated != published:
                if model.family == "moe":
                    rule = f"{size} is not that of the mixture of experts that it names"
                    raise UnusableRow(f"{name}: {rule}; empty the cell, or correct it", rule)
                return Architecture(vocab=model.vocab, family=model.family)
        return model

    def _vocabulary(self, stated: int | None, cells: Mapping[str, str]) -> int | None:
        """The vocabulary that a row states: a number, a number in words, or that of a model."""
        words = cells["vocab"]
        if stated is not None or not words:
            return stated
        other = found(words)
        vocab = number_in(words) or (other.vocab if other else None)
        if vocab is not None:
            self.assumed["vocab"] = vocab
        return vocab

    def _check(self, model: Architecture) -> None:
        assert model.hidden and model.heads
        if model.hidden % model.heads or model.heads % (model.kv_heads or 1):
            raise UnusableRow(
                f"heads = {model.heads} does not divide hidden = {model.hidden}, or kv_heads = "
                f"{model.kv_heads} does not divide heads; correct the cell",
                "heads does not divide hidden, or kv_heads does not divide heads",
            )

    def _by_family(self, model: Architecture) -> None:
        """Note what a model of that family takes where neither row nor name say it."""
        if model.kv_heads is None and model.family == "llama":
            self.assumed["kv_heads"] = model.heads
        if model.ffn is None:
            self.assumed["ffn_hidden"] = _inner(model)

    def _family(self, given: Architecture, name: str) -> Architecture:
        """The family whose parameters come to those that the row states, for an unknown name."""
        stated = self.numbers.get("params_b")
        families = (Architecture(family="gpt"), Architecture(family="llama"))
        if stated is not None and not given.missing:
            self._check(given)
            off = {family: _off(given.filled(family), stated) for family in families}
            nearest = min(families, key=lambda family: off[family])
            if off[nearest] <= ALIKE:
                self.assumed["family"] = nearest.family
                return nearest
        raise UnusableRow(
            f'whether "{name}" is built as a GPT or as a LLaMA is not known; write gpt or llama '
            "into model_name, or all sizes and params_b, which then tell",
            "whether the model is a GPT or a LLaMA is not known",
            ["model_name"],
        )

    def _compare(self, model: Architecture, name: str) -> None:
        """Raise UnusableRow where the sizes are not those of the parameters that the row states."""
        stated = self.numbers.get("params_b")
        if stated is not None and _off(model, stated) > WRONG:
            built = sum(layer.num_params for layer in model.specs()) / 1e9
            raise UnusableRow(
                f"params_b = {stated:g}, but the sizes of {name} come to {built:.3g} billion; "
                "correct either",
                "params_b is not what the sizes come to",
            )

    def network(self, setting: Setting, hardware: Hardware) -> None:
        """Note the network that a row of several nodes is assumed to have."""
        node = hardware.devices_per_node
        network = hardware.network
        if node and network and setting.mesh.ranks > node.value:
            self.or_else("network_gbps", None, round(network.bandwidth.value * 8 / 1e9, 3))
            self.or_else("devices_per_node", None, int(node.value))


def _supplied(source: str, cells: Mapping[str, str]) -> dict[str, Any]:
    try:
        return supplied(source, cells)
    except (ValueError, IndexError, StopIteration, ZeroDivisionError):
        return {}  # a missing value is named when the setting is built


def _off(model: Architecture, billions: float) -> float:
    """How far a model's parameters are from those stated, as a logarithm."""
    return abs(log(sum(layer.num_params for layer in model.specs()) / 1e9 / billions))


def _inner(model: Architecture) -> int:
    """The inner width of an MLP for which nothing is stated."""
    assert model.hidden
    if model.family == "gpt":
        return 4 * model.hidden
    sizes: dict[str, Any] = {
        "hidden_size": model.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": model.heads,
    }
    return llama.Config(family="llama", **sizes).inner_size
