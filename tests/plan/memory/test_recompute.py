"""The values of activation_checkpointing, and the bytes of the first layers of each stage."""

import pytest

from parallel3d import models
from parallel3d.model import recompute
from parallel3d.model.spec import Shape
from parallel3d.plan.layers.placement import blocks_in_stages
from parallel3d.plan.memory.peak import saved_bytes
from tests.plan.settings import GPT, changed, new_setting

pytestmark = pytest.mark.pure


def test_full_recomputation_covers_the_first_layers_of_each_stage():
    """Each layer in full recomputation saves the same bytes, up to all that a stage has."""
    layers = tuple(models.layers(GPT))
    setting = new_setting(layers, GPT.hidden_size, Shape(1, 1024), 8, pp=2, stages_per_rank=1)
    ways = [recompute.Recompute(full_layers=number) for number in range(11)]
    by_way = [saved_bytes(changed(setting, recompute=way)) for way in ways]
    block = layers[1]
    shape = Shape(1, 1024)
    in_full = block.cost(shape, recompute=recompute.FULL)
    freed = block.cost(shape).saved.bytes(2) - in_full.saved.bytes(2)
    sizes = blocks_in_stages(setting)
    assert sum(sizes) == GPT.num_hidden_layers and min(sizes) < max(sizes) < 10
    for stage, num_blocks in enumerate(sizes):
        for number, saved in enumerate(by_way):
            assert by_way[0][stage] - saved[stage] == freed * min(number, num_blocks)
    assert by_way[-1] == saved_bytes(changed(setting, recompute=recompute.FULL))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("none", "none"),
        ("mlp", "mlp"),
        ({"full": 3}, "full:3"),
        ("full:3", "full:3"),
        (["core_attn"], "selective"),
        (["mlp"], "mlp"),
        (["mlp_act", "layernorm"], "layernorm+mlp_act"),
    ],
)
def test_recomputation_as_text(value, text):
    assert recompute.parse(value) == recompute.parse(text)
    assert str(recompute.parse(value)) == text
