"""The layers of every family on meshes and in modes, for tests of their costs."""

import itertools
from typing import NamedTuple

from parallel3d import models
from parallel3d.model.recompute import FULL, MLP, NONE, SELECTIVE, Recompute, parse
from parallel3d.model.spec import LayerSpec, Shape
from tests.models.families import small
from tests.verify.pairwise import pairwise

SHAPE = Shape(2, 64)
SIZES = {"hidden_size": 64, "num_attention_heads": 8, "vocab_size": 1021}
# of more combinations each 61st, and no setting has 61 values
MOST = 1000
STRIDE = 61
PARTS = (MLP, parse("layernorm+mlp_act"))  # all with each setting of a family are slow
MESHES = ((1, False), (2, False), (2, True), (4, False), (4, True))  # tp, sequence parallelism
FEW_MESHES = ((2, True), (4, False))  # on one rank: test_measured_cost.py


class Case(NamedTuple):
    """One layer of a model on a mesh, in a mode."""

    layer: LayerSpec
    tp: int
    sequence_parallel: bool
    recompute: Recompute
    place: str  # "first", "middle" or "last"

    def cost(self, of=None):
        """The cost that the layer tells; or what `of` tells in its place."""
        return (of or self.layer.cost)(SHAPE, self.tp, self.sequence_parallel, self.recompute)


def settings_of(family, meshes):
    """The values that the settings of a family take here, those of the mesh and the mode besides.

    Each switch, each probability of dropout, grouped queries, and heads that rotate in part, where
    the family has them.
    """
    settings = {}
    for name, field in models.config_class(family).model_fields.items():
        if field.annotation is bool:
            settings[name] = (False, True)
        elif name.endswith("_pdrop"):
            settings[name] = (0.0, 0.1)
    if "partial_rotary_factor" in models.config_class(family).model_fields:
        settings["partial_rotary_factor"] = (1.0, 0.5)
    if "num_key_value_heads" in models.config_class(family).model_fields:
        settings["num_key_value_heads"] = (None, 2)
    return settings | {"mesh": meshes, "recompute": (NONE, SELECTIVE, FULL)}


def cases_of(family, full=False):
    """One case for each pair of settings, or (full) for each combination: its distinct layers.

    Of many combinations, a regular part. By default embeddings and heads that tell the same cost
    are there once on a mesh: most settings are those of a block.
    """
    cases = list(dict.fromkeys(_cases(family, full)))
    if full:
        return cases
    distinct = {}
    for case in cases:
        key = case if case.place == "middle" else (case.layer.build, case.layer.cost, case[1:])
        distinct.setdefault(key, case)
    return list(distinct.values())


def _cases(family, full):
    settings = settings_of(family, MESHES if full else FEW_MESHES)
    if full:
        more = ("layernorm", "mlp_act", "layernorm+mlp")
        settings["recompute"] += (*PARTS, *map(parse, more))

    def config_of(row):
        chosen = {name: row[name] for name in row if name not in ("mesh", "recompute")}
        return small(family, **SIZES, **chosen)

    def valid(row):
        try:
            config_of(row)
        except ValueError:
            return False
        return True

    product = (
        dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())
    )
    rows = [*filter(valid, product)] if full else pairwise(settings, valid)
    rows += [rows[-1] | {"mesh": (2, True), "recompute": parts} for parts in PARTS]
    for row in rows[:: STRIDE if len(rows) > MOST else 1]:
        layers = models.layers(config_of(row))
        kinds = {(layer.build, layer.cost): i for i, layer in reversed([*enumerate(layers)])}
        for i in kinds.values():
            place = "middle"
            if i == 0:
                place = "first"
            elif i == len(layers) - 1:
                place = "last"
            recompute = row["recompute"] if place == "middle" else NONE
            yield Case(layers[i], *row["mesh"], recompute, place)
