"""Copies of ZeRO's shards: when the planner takes them, and what it writes about them."""

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.plan.report.plan_rows import apply
from parallel3d.plan.report.plan_table import lines_of
from parallel3d.plan.report.row_json import choices_json
from parallel3d.plan.request import request_of
from parallel3d.plan.search import candidates
from parallel3d.plan.search.best_first import search
from parallel3d.plan.search.remedy import evaluate
from tests.plan.settings import A100

pytestmark = pytest.mark.pure

FIXED = {"pp": 1, "tp": 1, "cp": 1, "zero_stage": 3, "micro_batch": 1, "recompute": "full"}
FIXED |= {"schedule": "gpipe", "offload_optimizer": "none", "offload_param": "none"}


def request(devices=64, **fixed):
    config = RunConfig.from_json("llama-8b.json", ["--train_batch_size", str(8 * devices)])
    return request_of(config, A100, devices, FIXED | fixed)


def seconds(devices, **fixed):
    """The seconds of a step by the dp ranks of a copy."""
    asked = request(devices, **fixed)
    (mesh,) = candidates.meshes_in_turn(asked)[0]
    (flow, *_) = candidates.flows(asked, mesh)
    (order, *_) = candidates.orders(asked, flow)
    by_shards = {}
    for state in candidates.states(asked, mesh):
        setting = candidates.setting_of(asked, flow, order, state)
        by_shards[mesh.dp // state.copies] = evaluate(asked, setting).time.seconds
    return by_shards


def test_copies_win_with_several_gathers_a_step_and_many_nodes():
    often = seconds(512, weights="per_microbatch", gradient_reduction="per_step")
    assert {8, 16, 32, 64, 128, 256, 512} == often.keys(), "whole nodes of 8, or all ranks"
    assert min(often, key=often.get) == 8
    assert often[8] < 0.95 * often[512]


def test_plain_zero_wins_with_one_gather_a_step():
    """Sums of fp32 gradients between nodes are then more bytes than a gather of bf16 weights."""
    once = seconds(64, weights="per_step", gradient_reduction="per_step")
    assert min(once, key=once.get) == 64


def test_searched_number_is_written_into_the_config():
    ranking = search(request(512, weights="per_microbatch"), rows=1)
    plan = ranking.plans[0]
    shards = 512 // plan.setting.state.copies
    assert shards == 8
    assert choices_json(plan.setting, plan.memory)["dp_shards"] == shards
    config = RunConfig.from_json("llama-8b.json", ["--train_batch_size", "4096"])
    assert apply(config, plan).mesh.dp_shards == shards
    (line,) = [line for line in lines_of(plan.setting) if line.startswith("copies")]
    assert f"{plan.setting.state.copies} of {shards} shards (dp_shards {shards})" in line


def test_number_can_be_fixed():
    states = candidates.states(request(dp_shards=16), candidates.meshes_in_turn(request())[0][0])
    assert {state.copies for state in states} == {4}
    with pytest.raises(ConfigError, match="no mesh of 64 devices"):
        candidates.meshes_in_turn(request(dp_shards=3))


def test_one_node_has_no_copies():
    asked = request(8)
    (mesh,) = candidates.meshes_in_turn(asked)[0]
    assert {state.copies for state in candidates.states(asked, mesh)} == {1}
