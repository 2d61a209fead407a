"""Scaling of weights, multipliers and rates with a model's width and depth (floor 0, no torch).

Maximal update parametrisation (muP, arXiv:2203.03466, for Adam), in the form of the practitioner's
guide of Cerebras and EleutherAI; over depth CompleteP's (arXiv:2505.01618, table 1, alpha = 1). All
factors are relative to a base model, where each is 1 and the parametrisation is the standard one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field

from parallel3d.base.section import Problem, Section
from parallel3d.model.config import ModelConfig

Role = Literal["input", "hidden", "output", "vector", "router", "balance"]
"""The function of a parameter: from a table's rows to the width ("input"), width to width
("hidden"), width to logits ("output"), one number per feature ("vector": biases, norm gains), width
to experts' scores ("router"), or a bias of those scores that balances loads ("balance")."""
ROLES: tuple[Role, ...] = get_args(Role)
_Positive = Annotated[int, Field(gt=0)]
_Factor = Annotated[float, Field(gt=0)]


class Parametrization(Section):
    """How initial weights and learning rates follow the model's width and depth."""

    type: Literal["standard", "mup"] = "standard"
    """"standard": rates do not depend on the width. "mup": maximal update parametrisation; the
    optimizer's learning rate and weight decay are those of the model at `base_width`."""
    base_width: _Positive | None = None
    """The hidden_size at which "mup" is the standard parametrisation, bit for bit."""
    base_head_size: _Positive | None = None
    """The head size at base_width; attention scores then scale by 1/size, not 1/sqrt(size). null:
    this model's head size, for models that grow by more heads. Set it if heads grow wider."""
    base_depth: _Positive | None = None
    """The num_hidden_layers at which rates were tuned, to transfer them over depth as well
    (CompleteP). null: depth has the same effect as in the standard parametrisation."""
    input_multiplier: _Factor = 1.0
    """Multiplies the embedding's vectors; a constant to tune at base_width."""
    output_multiplier: _Factor = 1.0
    """Multiplies the logits, besides base_width/hidden_size; a constant to tune at base_width."""

    def _problems(self) -> Iterator[Problem]:
        if self.type == "mup" and self.base_width is None:
            rule = "is missing: rates are relative to a base model"
            remedy = "set it to the hidden_size at which they were tuned"
            yield Problem("base_width", None, rule, remedy)
        for name, field in type(self).model_fields.items() if self.type == "standard" else ():
            if (value := getattr(self, name)) != field.default:
                rule = 'has no effect with type = "standard"'
                remedy = 'use "mup", or remove it'
                yield Problem(name, value, rule, remedy)


STANDARD = Parametrization()


class Rate(NamedTuple):
    """The factors of a role's learning rate, weight decay and Adam's eps."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


@dataclass(frozen=True)
class Scales:
    """The factors of one model, equal on every mesh; all are 1 at the base model's sizes."""

    width: float = 1.0
    """Width relative to the base model's."""
    depth: float = 1.0
    """Depth relative to the base model's."""
    input: float = 1.0
    """Multiplies the embedding's vectors."""
    branch: float = 1.0
    """Multiplies the outputs of attention and MLP."""
    output: float = 1.0
    """Multiplies the inputs of the output projection."""
    query: float = 1.0
    """Multiplies the queries, besides 1/sqrt(head size)."""
    hidden_std: float = 1.0
    """Multiplies the standard deviation of the role "hidden", whose variance follows the fan-in.
    The output's weights keep theirs, because their multiplier shrinks."""
    base_depth: int | None = None
    """Layers of the base model; None: rates are not transferred over depth."""
    balances: bool = False
    """True if the model has parameters of the role "balance"."""

    @classmethod
    def of(cls, model: ModelConfig, head_size: int) -> "Scales":
        """Return the factors of a model of any family."""
        settings = parametrization_of(model)
        depth = model.num_hidden_layers
        balances: bool = getattr(model, "score_bias", False)
        if settings.base_width is None:
            return cls(balances=balances)
        wider = model.hidden_size / settings.base_width
        deeper = depth / (settings.base_depth or depth)
        return cls(
            width=wider,
            depth=deeper,
            input=settings.input_multiplier,
            branch=1 / deeper,
            output=settings.output_multiplier / wider,
            query=sqrt((settings.base_head_size or head_size) / head_size),
            hidden_std=1 / sqrt(wider),
            base_depth=settings.base_depth,
            balances=balances,
        )

    def rate(self, role: Role | None, power: float = 1.0) -> Rate:
        """Return the factors of a role's rates; a parameter without a role has factors of 1.

        Hidden matrices have the rate over width**power, 1 for Adam. The decay in a step is
        rate x decay, so the decay grows by what the rate loses.
        """
        if role == "balance":
            return Rate(lr=0.0)  # no gradient moves it, but engine/score_biases.py
        if role is None:
            return Rate()
        is_inner = role in ("hidden", "vector", "router")
        eps = 1.0
        if self.base_depth:
            eps = 1 / (self.width * self.depth) if is_inner else 1 / self.width
        if role == "hidden":
            return Rate(1 / self.width**power, self.width**power, eps)
        if role == "router":
            return Rate(1 / self.width, self.width, eps)
        return Rate(eps=eps)

    def scores(self, head_size: int) -> float | None:
        """Return the factor of attention scores; None for the usual 1/sqrt(head_size)."""
        return None if self.query == 1 else self.query / sqrt(head_size)

    def rates(self, power: float = 1.0) -> dict[Role | None, Rate]:
        """Return the factors of every role, and of a parameter without a role (None)."""
        roles = (role for role in ROLES if role != "balance" or self.balances)
        return {role: self.rate(role, power) for role in (None, *roles)}


def parametrization_of(model: ModelConfig) -> Parametrization:
    """Return a model's parametrisation; the standard one if its family has no such setting."""
    parametrization: Parametrization = getattr(model, "parametrization", STANDARD)
    return parametrization
