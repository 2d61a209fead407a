"""Sizes of weights, multipliers and rates by a model's width and depth (floor 0, no torch).

Maximal update parametrisation (muP, arXiv:2203.03466, for Adam), in the form of the practitioner's
guide of Cerebras and EleutherAI; over depth CompleteP's (arXiv:2505.01618, table 1, alpha = 1). All
is relative to a base model, at whose sizes every factor is 1: there it is the standard one.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field, model_validator

from parallel3d.base.section import Problem, Problems, Section

Role = Literal["input", "hidden", "output", "vector"]
"""The map that a parameter is: a table's rows to the width ("input"), width to width ("hidden"),
width to logits ("output"), or one number for each feature ("vector": biases, gains of norms)."""
ROLES: tuple[Role, ...] = get_args(Role)
_Positive = Annotated[int, Field(gt=0)]
_Factor = Annotated[float, Field(gt=0)]


class Parametrization(Section):
    """How initial sizes and rates follow the width: not at all, or so that good rates transfer."""

    type: Literal["standard", "mup"] = "standard"
    """"standard": the same at every width. "mup": maximal update parametrisation; the optimizer's
    learning rate and weight decay are those of the model at `base_width`."""
    base_width: _Positive | None = None
    """The hidden_size at which "mup" is the standard parametrisation, bit for bit."""
    base_head_size: _Positive | None = None
    """The width of a head at base_width, for scores that are scaled by 1/size, not 1/sqrt(size).
    null: that of this model, as wider models have more heads; give it where heads get wider."""
    base_depth: _Positive | None = None
    """The num_hidden_layers at which rates were tuned, to transfer them over depth, too
    (CompleteP); null: depth changes what it changes in the standard parametrisation."""
    input_multiplier: _Factor = 1.0
    """What the embedding's vectors are multiplied by; a constant to be tuned at base_width."""
    output_multiplier: _Factor = 1.0
    """What the logits are multiplied by besides base_width/hidden_size; to be tuned likewise."""

    @model_validator(mode="after")
    def _check(self) -> "Parametrization":
        if self.type == "mup" and self.base_width is None:
            rule = "is missing: rates are relative to a base model"
            remedy = "give the hidden_size at which they were tuned"
            raise Problems([Problem("base_width", None, rule, remedy)])
        for name, field in type(self).model_fields.items() if self.type == "standard" else ():
            if (value := getattr(self, name)) != field.default:
                rule, remedy = 'means nothing with type = "standard"', 'use "mup", or remove it'
                raise Problems([Problem(name, value, rule, remedy)])
        return self


class Rate(NamedTuple):
    """The factors of a role's learning rate, weight decay and Adam's eps."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


@dataclass(frozen=True)
class Scales:
    """The factors of one model, global on every mesh; 1 at the sizes of the base model."""

    width: float = 1.0  # how many times the base's
    depth: float = 1.0
    input: float = 1.0  # multiplies the embedding's vectors
    branch: float = 1.0  # multiplies what attention and MLP add to the residual stream
    output: float = 1.0  # multiplies the vectors that the logits are made of
    query: float = 1.0  # multiplies the queries, on top of 1/sqrt(head size)
    # Multiplies the standard deviation of the role "hidden": the variance goes by the fan-in. The
    # output's weights stay, as their multiplier falls.
    hidden_std: float = 1.0
    base_depth: int | None = None  # None: rates are not transferred over depth

    @classmethod
    def of(cls, model: Any, head_size: int) -> "Scales":
        """Return the factors of a model of any family."""
        settings, depth = parametrization_of(model), model.num_hidden_layers
        if settings.base_width is None:
            return cls()
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
        )

    def rate(self, role: Role | None) -> Rate:
        """The factors of a role's rates; a parameter without a role has the plain ones.

        AdamW's decay of a step is rate x decay: what the one loses the other gains.
        """
        if role is None:
            return Rate()
        is_inner = role in ("hidden", "vector")
        eps = 1 / (self.width * (self.depth if is_inner else 1)) if self.base_depth else 1.0
        if role == "hidden":
            return Rate(1 / self.width, self.width, eps)
        return Rate(eps=eps)

    def scores(self, head_size: int) -> float | None:
        """The factor of attention's scores; None: 1/sqrt(head_size), as usual."""
        return None if self.query == 1 else self.query / sqrt(head_size)

    def rates(self) -> dict[Role | None, Rate]:
        """The factors of the rates of every role, and of a parameter without a role."""
        return {role: self.rate(role) for role in (None, *ROLES)}


def parametrization_of(model: Any) -> Parametrization:
    """A model's parametrisation; the standard one of a family that has no such setting."""
    found: Parametrization = getattr(model, "parametrization", Parametrization())
    return found
