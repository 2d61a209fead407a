"""Facts about a model that are found out by trying its parts, on tensors with memory.

An architecture may say each of them in its own way in its code. They are asked of a `Skeleton`,
with parts of which the model runs.
"""

import copy
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from parallel3d.models.transformers.facts import Unsupported
from parallel3d.models.transformers.stand_ins import Arguments, Given, Heard


class Logits(NamedTuple):
    """The function that a model applies to the products with its output projection, z.

    They become softcap * tanh(scale * z / softcap), or scale * z if softcap is None.
    """

    scale: float = 1.0
    softcap: float | None = None


def width_of(skeleton: Any) -> int:
    """Return the width of embeddings that no layer reads: 1, unless the model needs all.

    With 1, what it does with them costs nothing.
    """
    hidden = int(skeleton.settings.hidden_size)
    given = torch.ones(1, 2, hidden)
    base, port = skeleton.around(len(skeleton.layers) - 1, None, {})
    port.is_open = True
    port.given = given
    heard = Heard()
    model: Any = skeleton.whole(base, heard)
    # Broad: a model may fail in its own way.
    with suppress(Exception), torch.no_grad():
        model(**skeleton.inputs_of(1, 2, given))
    return 1 if heard.shape == given.shape else hidden


def may_be_alone(skeleton: Any) -> bool:
    """Return True if a layer that is the only one in the list gets what it gets among all.

    Then the model need not walk past the others, which takes the host 8 µs for each.
    """
    try:
        among_all = [_inputs_at(skeleton, number) for number in range(len(skeleton.layers))]
        skeleton.is_alone = True
        alone = [_inputs_at(skeleton, number) for number in range(len(skeleton.layers))]
    except Exception:  # broad: a model may count its layers in its own way
        return False
    finally:
        skeleton.is_alone = False
    return all(map(_are_equal, among_all, alone))


def _inputs_at(skeleton: Any, number: int) -> object:
    """Return the arguments of a layer beside its input, and what follows the layers gets."""
    heard = Arguments()
    base, port = skeleton.around(number, heard, {})
    port.is_open = True
    port.given = torch.ones(1, 4, skeleton.settings.hidden_size)
    with torch.no_grad():
        output = base(**skeleton.inputs_of(1, 4, port.given))
    return heard.values, output[0]


def has_plain_table(skeleton: Any) -> bool:
    """Return True if the layers begin with what the table of tokens gives, unchanged."""
    if skeleton.watched.before != [skeleton.token]:
        return False
    x = torch.randn(1, 4, skeleton.settings.hidden_size, generator=torch.Generator().manual_seed(0))
    base, port = skeleton.around(0, None, {skeleton.token: Given(x)})
    port.is_open = True
    inputs = skeleton.inputs_of(1, 4, x)
    inputs["inputs_embeds"] = None
    with suppress(Exception), torch.no_grad():  # broad: a model may fail in its own way
        base(**inputs, input_ids=torch.zeros(1, 4, dtype=torch.int64))
        return port.heard is not None and torch.equal(port.heard, x)
    return False


def logits_of(skeleton: Any) -> Logits:
    """Find out by trying what the model does to the products with its output projection."""
    z = torch.tensor([1e-4, -1e-3, 0.1, 1.0, -3.0, 10.0, 50.0, 1e12]).view(1, 1, -1)
    base, _ = skeleton.around(0, None, {})
    model: Any = skeleton.whole(base, Given(z))
    with torch.no_grad():
        y = model(**skeleton.inputs_of(1, 1, z)).logits
    scale = float(y[0, 0, 0] / z[0, 0, 0])
    if torch.allclose(y, scale * z, rtol=1e-4):
        return Logits(scale if abs(scale - 1) > 1e-6 else 1.0)
    softcap = float(y[0, 0, -1])
    if torch.allclose(y, softcap * torch.tanh(scale * z / softcap), rtol=1e-3):
        return Logits(scale if abs(scale - 1) > 1e-3 else 1.0, softcap)
    raise Unsupported("changes its logits in another way than by a factor and a soft-cap")


def computes_rms_norm(module: nn.Module, eps: float) -> bool:
    """Return True if a module with one weight and an eps gives what an RMSNorm would."""
    shape = module.get_parameter("weight").shape
    if len(shape) != 1 or shape[0] < 2:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, *shape, generator=generator)
    weight = torch.randn(shape, generator=generator)
    trial: Any = copy.copy(module)
    object.__setattr__(trial, "_parameters", {"weight": weight})
    try:
        y = trial(x)
    except Exception:  # broad: a module may want other inputs
        return False
    return torch.allclose(y, F.rms_norm(x, shape, weight, eps), rtol=1e-5, atol=1e-6)


def _are_equal(one: object, other: object) -> bool:
    """Return True if nested values are equal, tensors in each element."""
    values, form = tree_flatten(one)
    others, other_form = tree_flatten(other)
    if form != other_form:
        return False
    for x, y in zip(values, others, strict=True):
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            if not torch.equal(x, y):
                return False
        elif x is not y and x != y:
            return False
    return True
