"""Ladders that cannot be: exit code 2, and a message with place, value, rule and remedy."""

import copy
import json

import pytest

from tests.scaling.ladder.cases import micro, write

pytestmark = pytest.mark.pure

SMALL = {"model": {"hidden_size": 16, "num_hidden_layers": 1}}
BASE = micro("runs")["base"]


def base(**changes):
    """The base with changes by dotted paths below "parallel3d", or of its own keys."""
    changed = copy.deepcopy(BASE)
    for key, value in changes.items():
        *blocks, name = key.split("__")
        place = changed
        for block in blocks:
            place = place.setdefault(block, {})
        place[name] = value
    return changed


def sized(**model):
    return [SMALL, {"model": {"hidden_size": 32, "num_hidden_layers": 1} | model}]


LADDERS = {
    "one size": ({"sizes": [SMALL]}, "sizes = [", "needs several sizes; use two"),
    "one budget": ({"budgets": {"flops": [1e9]}}, "budgets.flops = [", "one budget; use two"),
    "equal budgets": (
        {"budgets": {"tokens": [512, 512]}},
        "budgets.tokens = [512.0, 512.0]", "only one budget; use two",
    ),
    "a budget beyond all numbers": (
        {"budgets": {"flops": [1e12, 1e60]}},
        "budgets.flops.1 = 1e+60", "at most 1e+40; write 1e+40",
    ),
    "two kinds of budgets": (
        {"budgets": {"tokens": [512], "flops": [1e9]}}, "budgets = ", "set exactly one",
    ),
    "no budgets": ({"budgets": {}}, "budgets = ", "sets none of flops"),
    "an unknown law": (
        {"hyperparameters": {"learning_rate": "chinchilla"}},
        'hyperparameters.learning_rate = "chinchilla"',
        'must be a number, or must be "olmo" or "step-law"',
    ),
    "heads that do not divide": (
        {"sizes": sized(num_attention_heads=3)},
        "sizes.1.model.num_attention_heads = 3", "does not divide hidden_size=32; use ",
    ),
    "a width without whole heads": (
        {"sizes": sized(hidden_size=36)},
        "sizes.1.model.hidden_size = 36", "is not a multiple of head_size=8; use 32 or 40",
    ),
    "a size between those of the rule": (
        {"sizes": [1e3, 1e6], "head_size": 64}, "sizes.0.params = 1000", "smaller head_size",
    ),
    "the same size twice": ({"sizes": [SMALL, SMALL]}, "two runs are the same", "there twice"),
    "a smallest run that does not fit": (
        {
            "base": base(parallel3d__run={"hardware": "V100-SXM2-16GB"}, fp16={"enabled": True}),
            "sizes": [6e9, 9e9], "head_size": 128,
        },
        "the ladder cannot be run: 5.76G-d512: ", "does not fit on 1 x V100-SXM2-16GB: ",
    ),
    "a smallest run for which there is no plan": (
        {
            "base": base(parallel3d__run={"hardware": "V100-SXM2-16GB"}, fp16={"enabled": True}),
            "sizes": [6e10, 9e10], "head_size": 128, "mesh": "plan", "devices": 2,
        },
        "the ladder cannot be run: 6", "NOTHING FITS on 2 x V100-SXM2-16GB: the smallest",
    ),
    "tp that does not divide": (
        {"mesh": {"pp": 1, "dp": 1, "tp": 3}}, "parallel3d.mesh.tp = 3", "does not divide",
    ),
    "no mesh": ({"mesh": 4}, "mesh = 4", 'write {...}, or write "plan"'),
    "an unknown key": ({"budget": {}}, "budget", "budgets"),
    "a length of its own": (
        {"base": base(parallel3d__train={"steps": 5})},
        "base.parallel3d.train.steps = 5", "is set by the ladder; remove it",
    ),
    "an unknown family": (
        {"base": base(parallel3d__model={"family": "lama"})}, '.family = "lama"', "a model family",
    ),
    "no vocabulary": (
        {"base": base(parallel3d__data={"sequence_length": 16, "tokenizer": "gpt2"})},
        'vocab_size = "auto"', "must be a number, which all sizes share",
    ),
    "samples of no tokens": (
        {"base": base(parallel3d__data={"sequence_length": 0})},
        "data.sequence_length = 0", "must be a number of tokens; set it",
    ),
    "a fixed inner width": (
        {
            "base": base(parallel3d__model={"family": "llama", "intermediate_size": 64}),
            "mlp_ratio": None,
        },
        "model.intermediate_size = 64", "would be the same at every size; remove it, and set mlp",
    ),
    "a held-out run without a budget": (
        {"held_out": [{"size": SMALL}]}, "held_out.0.flops", 'set either "flops" or "tokens"',
    ),
    "a size of another budget": (
        {"sizes": [SMALL, SMALL | {"budgets": [7]}]},
        "sizes.1.budgets = [7.0]", "must be among budgets.tokens",
    ),
    "seeds twice": ({"seeds": [1, 1]}, "two runs are the same", "a seed that is there twice"),
    "no seeds": ({"seeds": []}, "seeds = []", "; "),
    "a width that is no number": (
        {"sizes": sized(hidden_size="a")}, 'sizes.1.model.hidden_size = "a"', "must be an integer",
    ),
    "a mesh of the base that is none": (
        {"base": base(parallel3d__mesh=5)},
        "base.parallel3d.mesh = 5", "must be an object; write {...}, or remove it",
    ),
    "parameters of the optimizer that are none": (
        {"base": base(optimizer={"type": "AdamW", "params": None})},
        "base.optimizer.params = null", "must be an object; write {...}, or remove it",
    ),
    "no base": ({"base": {"optimizer": {}}}, "base.parallel3d.model.family", "use one of: "),
}  # fmt: skip


@pytest.fixture
def refused(scaled, tmp_path):
    """Gives what the command says where it must refuse."""

    def run(*arguments):
        code, out, err = scaled(*arguments)
        assert (code, out) == (2, ""), err
        assert err.startswith("scale") and "Traceback" not in err and "; " in err
        assert not (tmp_path / "runs").exists()
        return err

    return run


# A search through all plans that are too large: tests/plan/search/ has it for one run.
LONG = {"a smallest run for which there is no plan"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in LADDERS]
)
def test_impossible_ladder_is_refused(refused, tmp_path, name):
    changes, place, rule = LADDERS[name]
    err = refused("plan", "--ladder", write(tmp_path, **changes), "--json")
    assert place in err and rule in err, err


@pytest.mark.parametrize("value", [None, "abc", [1]])
@pytest.mark.parametrize(
    "path",
    ["optimizer", *(f"parallel3d.{name}" for name in ("train", "checkpoint", "run", "mesh"))],
)
def test_block_of_the_base_must_be_an_object(refused, tmp_path, path, value):
    changed = base(**{path.replace(".", "__"): value})
    err = refused("plan", "--ladder", write(tmp_path, base=changed), "--json")
    assert f"base.{path} = {json.dumps(value)}: must be an object" in err


def test_run_refuses_an_impossible_ladder(refused, tmp_path):
    err = refused("run", "--ladder", write(tmp_path, sizes=[SMALL]), "--parallel", 2)
    assert "needs several sizes" in err
    assert "--parallel = 0" in refused("run", "--ladder", "ladder.json", "--parallel", 0)


@pytest.mark.parametrize("text", ["", "[]", '{"base": 1', "{}", '{"base": {}, "base": {}}'])
def test_invalid_ladder_is_refused(refused, tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    refused("plan", "--ladder", tmp_path / "bad.json")
    assert "no config file" in refused("plan", "--ladder", tmp_path / "none.json")


def test_comments_in_a_ladder_are_accepted(scaled, tmp_path):
    file = write(tmp_path)
    text = json.dumps(json.loads(file.read_text()), indent=1)
    file.write_text(text.replace("{", "{  // a comment", 1).replace("\n}", ",\n}"))
    code, out, _ = scaled("plan", "--ladder", file, "--json")
    assert code == 0 and len(json.loads(out)["runs"]) == 4
