"""Each remedy about ladders, tables and forecasts is applied as it is written, and it works."""

import json
import re

import numpy as np
import pytest

from tests.launch.test_ladder_bad import LADDERS, LONG, SMALL, base, sized
from tests.launch.test_scale_bad import COLUMNS, FILES, GOOD, TABLES
from tests.scaling.cases import write_csv
from tests.scaling.ladder.cases import write

pytestmark = pytest.mark.pure

LARGER = {"model": {"hidden_size": 32, "num_hidden_layers": 1}}
FIT = ("fit", "runs.csv", "--bootstraps", "0", "--estimator", "squares", "--no-report")
WIDE = [{"model": {"hidden_size": n, "num_hidden_layers": 1}} for n in (64, 128)]
# The changes that the message of each ladder of LADDERS asks for, alternative by alternative.
MENDS = {
    "one size": [{"sizes": [SMALL, LARGER]}],
    "one budget": [{"budgets": {"flops": [1e9, 4e9]}}],
    "equal budgets": [{"budgets": {"tokens": [512, 1024]}}],
    "two kinds of budgets": [
        {"budgets": {"tokens": [512, 1024]}},
        {"budgets": {"flops": [1e9, 4e9]}},
    ],
    "no budgets": [{"budgets": {"flops": [1e9, 4e9]}}],
    "an unknown law": [
        {"hyperparameters": {"learning_rate": value, "batch_tokens": 64}}
        for value in (0.01, "olmo", "step-law")
    ],
    "heads that do not divide": [{"sizes": sized(num_attention_heads=n)} for n in (1, 2, 4, 8, 16)],
    "a width without whole heads": [
        {"sizes": sized(hidden_size=32)},
        {"sizes": sized(hidden_size=40)},
        {"sizes": sized(hidden_size=36, num_attention_heads=6)},
    ],
    "a size between those of the rule": [{"head_size": 8}, {"sizes": WIDE}],
    "the same size twice": [{"sizes": [SMALL, LARGER]}],
    "tp that does not divide": [{"mesh": {"pp": 1, "dp": 1, "tp": tp}} for tp in (1, 2)],
    "no mesh": [{"mesh": {}}],
    "an unknown key": [{"budget": None}],
    "a length of its own": [{"base": base()}],
    "an unknown family": [{"base": base(parallel3d__model={"family": "llama"})}],
    "no vocabulary": [
        {
            "base": base(
                parallel3d__data={"sequence_length": 16, "tokenizer": "gpt2"},
                parallel3d__model={"family": "llama", "vocab_size": 50257},
            )
        },
    ],
    "samples of no tokens": [{"base": base()}],
    "a fixed inner width": [{"base": base(), "mlp_ratio": 2}],
    "a held-out run without a budget": [
        {"held_out": [{"size": SMALL, "tokens": 4096}]},
        {"held_out": [{"size": SMALL, "flops": 1e10}]},
    ],
    "a size of another budget": [{"sizes": [SMALL, LARGER | {"budgets": [512]}]}],
    "seeds twice": [{"seeds": [1]}, {"seeds": [1, 2]}],
    "a width that is no number": [{"sizes": sized(hidden_size=64)}],
    "a mesh of the base that is none": [{"base": base(parallel3d__mesh={})}, {"base": base()}],
    "parameters of the optimizer that are none": [
        {"base": base(optimizer={"type": "AdamW", "params": {}})},
        {"base": base(optimizer={"type": "AdamW"})},
    ],
    "no base": [{"base": base()}],
    "a smallest run that does not fit": [{"mesh": {"pp": 16, "dp": 1, "tp": 2}}],
    "a budget beyond all numbers": [{"budgets": {"flops": [1e12, 1e14]}}],
    "no seeds": [{"seeds": [1]}],
}


@pytest.mark.parametrize("name", MENDS)
def test_mended_ladder_is_planned(scaled, tmp_path, name):
    changes, *_ = LADDERS[name]
    code, _, err = scaled("plan", "--ladder", write(tmp_path, **changes), "--json")
    assert code == 2, err
    for mend in MENDS[name]:
        code, _, err = scaled("plan", "--ladder", write(tmp_path, **changes | mend), "--json")
        assert code == 0, (mend, err)


def test_every_ladder_is_mended():
    assert LADDERS.keys() - MENDS.keys() == LONG


def test_counts_in_a_ladder_are_written_as_people_write_them(scaled, tmp_path):
    counts = {"sizes": [20e3, 300e3], "aspect_ratio": 24, "budgets": {"tokens": [1e6, 2e6]}}
    texts = {"sizes": ["20K", {"params": "0.3M"}], "budgets": {"tokens": ["1_000_000", "2M"]}}
    texts |= {"hyperparameters": {"learning_rate": 0.01, "batch_tokens": "0.064k"}}
    shown = []
    for changes in (counts, counts | texts):
        code, out, err = scaled("plan", "--ladder", write(tmp_path, **changes), "--json")
        assert code == 0, err
        shown.append(out)
    assert shown[0] == shown[1]


def test_size_that_the_message_names_is_taken(scaled, tmp_path):
    """Its number of parameters is one that the rule reaches."""
    changes = {"sizes": [1e3, 1e6], "head_size": 64}
    for _ in range(2):
        _, _, err = scaled("plan", "--ladder", write(tmp_path, **changes), "--json")
        named = re.search(r"sizes\.(\d+)\.params = .* has ([\d,]+); use that", err)
        if named:
            changes["sizes"][int(named[1])] = int(named[2].replace(",", ""))
    code, _, err = scaled("plan", "--ladder", write(tmp_path, **changes), "--json")
    assert code == 0, err


# Tables of runs


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_table_with_the_runs_that_the_message_asks_for_is_fitted(scaled, tmp_path, name):
    """Add runs, give columns, correct the table: COLUMNS is what they ask for."""
    columns, _ = TABLES[name]
    write_csv(tmp_path / "runs.csv", **columns)
    assert scaled(*FIT)[0] == 2
    write_csv(tmp_path / "runs.csv", **COLUMNS)
    code, _, err = scaled(*FIT)
    assert code == 0, err


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_written_table_is_fitted(scaled, tmp_path, name):
    content, _ = FILES[name]
    if content is not None:
        (tmp_path / "runs.csv").write_bytes(content)
    assert scaled(*FIT)[0] == 2
    write_csv(tmp_path / "runs.csv", **COLUMNS)
    assert scaled(*FIT)[0] == 0


@pytest.mark.slow
def test_counts_are_written_as_people_write_them(scaled, tmp_path):
    sizes = ["1M", "2M", "4M"] * 3
    tokens = ["20M", "0.04B", "8e7", "200M", "400M", "800M", "2B", "4B", "8B"]
    losses = [3.5, 3.3, 3.1, 3.0, 2.8, 2.6, 2.8, 2.5, 2.2]
    write_csv(tmp_path / "runs.csv", params=sizes, tokens=tokens, loss=losses)
    code, _, err = scaled(*FIT)
    assert code == 0, err
    data = json.loads((tmp_path / "fit.json").read_text())["data"]
    assert data["params"][:3] == [1e6, 2e6, 4e6] and data["tokens"][1:3] == [4e7, 8e7]


@pytest.mark.slow
def test_table_may_be_lines_or_a_list_of_objects(scaled, tmp_path):
    rows = []
    for params, tokens, loss in zip(*COLUMNS.values(), strict=True):
        rows.append({"params": params, "tokens": tokens, "loss": loss})
    for text in (json.dumps(rows), "\n".join(map(json.dumps, rows))):
        (tmp_path / "runs.csv").write_text(text)
        assert scaled(*FIT)[0] == 0


UNIQUE = {"unique": GOOD.tokens / 2}
ERRORS = {"errors": [0.01] * 16}
FLAGS = [
    (("--n-column", "parms"), {}, [("--n-column", "params")]),
    (("--loss-column", "x"), {}, [("--loss-column", "loss"), ()]),
    (("--where", "params"), {"kind": ["a"] * 16}, [("--where", "kind=a")]),
    (("--where", "kind=9"), {"kind": ["a"] * 16}, [("--where", "kind=a")]),
    (("--law", "kaplan"), {}, [("--law", "parametric")]),
    (("--delta", "0"), {}, [("--delta", "0.1")]),
    (("--weighted", "--law", "isoflop"), {}, [("--law", "isoflop")]),
    (("--weighted",), ERRORS, [("--weighted", "--error-column", "errors"), ()]),
    (
        ("--law", "data-constrained"),
        UNIQUE,
        [
            (
                "--law",
                "data-constrained",
                "--unique-column",
                "unique",
                "--base",
                "base.json",
                "--estimator",
                "huber",
            )
        ],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "more", "mends"), FLAGS)
def test_mended_flags_fit(scaled, tmp_path, flags, more, mends):
    write_csv(tmp_path / "runs.csv", **COLUMNS | more)
    law = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
    (tmp_path / "base.json").write_text(json.dumps(law))
    assert scaled(*FIT, *flags)[0] == 2
    for mend in mends:
        code, _, err = scaled(*FIT, *mend)
        assert code == 0, (mend, err)


@pytest.mark.slow
def test_swept_setting_is_named_and_swept_more_widely(scaled, tmp_path):
    sizes, rates = (a.ravel() for a in np.meshgrid([1e7, 1e8, 1e9], [1.0, 2.0, 4.0]))
    columns = {"params": sizes, "tokens": 20 * sizes, "rate": rates}
    narrow = columns | {"loss": 3 - np.log(rates)}
    write_csv(tmp_path / "runs.csv", **narrow)
    words = ("fit", "runs.csv", "--bootstraps", "0", "--no-report", "--law", "best-value")
    code, _, err = scaled(*words)
    assert code == 2 and "--setting-column: is missing; name the column of the swept" in err
    code, _, err = scaled(*words, "--setting-column", "rate")
    assert code == 2 and "widen the sweep" in err
    write_csv(tmp_path / "runs.csv", **columns | {"loss": 3 + np.log(rates / 2) ** 2})
    code, _, err = scaled(*words, "--setting-column", "rate")
    assert code == 0, err


# Forecasts

RUN = ("--params", "1e10", "--tokens", "3e11")
FORECASTS = [
    ((), [("--flops", "1e22"), RUN]),
    (("--params", "1e9", "--flops", "1e22"), [("--flops", "1e22"), RUN]),
    (("--flops", "-3"), [("--flops", "1e22")]),
]


@pytest.mark.slow
def test_forecasts_are_asked_for_as_the_messages_say(scaled, tmp_path):
    write_csv(tmp_path / "runs.csv", **COLUMNS)
    code, _, err = scaled("predict", "--fit", "fit.json", *RUN)
    assert code == 2 and "`parallel3d scale fit` and `scale run` write it" in err
    assert scaled(*FIT)[0] == 0
    predict = ("predict", "--fit", "fit.json")
    for flags, mends in FORECASTS:
        assert scaled(*predict, *flags)[0] == 2
        for mend in mends:
            code, _, err = scaled(*predict, *mend)
            assert code == 0, err
    assert scaled(*predict, *RUN, "--register", "one.json")[0] == 0
    code, _, err = scaled(*predict, *RUN, "--register", "one.json")
    assert code == 2 and "name another file" in err
    assert scaled(*predict, *RUN, "--register", "two.json")[0] == 0
    here = ("--params", str(GOOD.params[0]), "--tokens", str(GOOD.tokens[0]))
    code, _, err = scaled(*predict, *here, "--register", "three.json")
    assert code == 2 and "register the forecast of a run that is not there" in err
    (tmp_path / "other.json").write_text("{}")
    code, _, err = scaled(*FIT, "--forecasts", "other.json")
    assert code == 2 and "name a file that --register wrote" in err
    assert scaled(*FIT, "--forecasts", "one.json")[0] == 0


@pytest.mark.slow
def test_repeated_tokens_are_forecast_with_their_number(scaled, tmp_path):
    write_csv(tmp_path / "runs.csv", **COLUMNS | UNIQUE)
    law = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
    (tmp_path / "base.json").write_text(json.dumps(law))
    flags = ("--law", "data-constrained", "--unique-column", "unique")
    code, _, err = scaled(*FIT, *flags, "--base", "base.json")
    assert code == 2 and "use huber" in err
    huber = ("fit", "runs.csv", "--bootstraps", "0", "--no-report", *flags, "--base", "base.json")
    code, _, err = scaled(*huber)
    assert code == 0, err
    predict = ("predict", "--fit", "fit.json")
    code, _, err = scaled(*predict, "--flops", "1e22")
    assert code == 2 and "give --params and --tokens as well as --unique-tokens" in err
    code, _, err = scaled(*predict, *RUN)
    assert code == 2 and "--unique-tokens: is missing" in err
    code, _, err = scaled(*predict, *RUN, "--unique-tokens", "1e11")
    assert code == 0, err


@pytest.mark.slow
def test_runs_of_more_than_one_epoch_are_added(scaled, tmp_path):
    """Or the law of runs that repeat nothing is named."""
    law = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
    (tmp_path / "base.json").write_text(json.dumps(law))
    flags = ("--law", "data-constrained", "--unique-column", "unique")
    fit = ("fit", "runs.csv", "--bootstraps", "0", "--no-report", *flags)
    write_csv(tmp_path / "runs.csv", **COLUMNS | {"unique": GOOD.tokens})
    code, _, err = scaled(*fit, "--base", "base.json")
    assert code == 2 and "no run repeats its tokens; add runs of more than one epoch" in err
    write_csv(tmp_path / "runs.csv", **COLUMNS | UNIQUE)
    code, _, err = scaled(*fit)
    assert code == 2 and "or pass --base with the fit.json of a parametric law" in err
    code, _, err = scaled(*fit, "--base", "base.json")
    assert code == 0, err


@pytest.mark.slow
def test_fit_of_a_law_that_forecasts_is_named(scaled, tmp_path):
    write_csv(tmp_path / "runs.csv", **COLUMNS)
    assert scaled(*FIT)[0] == 0
    (tmp_path / "fit.json").rename(tmp_path / "law.json")
    (tmp_path / "other.json").write_text("{}")
    code, _, err = scaled("predict", "--fit", "other.json", *RUN)
    assert code == 2 and "is not a fit; name a fit.json of `scale fit`" in err
    sizes, rates = (a.ravel() for a in np.meshgrid([1e7, 1e8, 1e9], [1.0, 2.0, 4.0]))
    loss = 3 + np.log(rates / 2) ** 2
    write_csv(tmp_path / "runs.csv", params=sizes, tokens=20 * sizes, rate=rates, loss=loss)
    words = ("fit", "runs.csv", "--bootstraps", "0", "--no-report", "--law", "best-value")
    assert scaled(*words, "--setting-column", "rate")[0] == 0
    code, _, err = scaled("predict", "--fit", "fit.json", *RUN)
    assert code == 2 and "use the fit of another" in err
    code, _, err = scaled("predict", "--fit", "law.json", *RUN)
    assert code == 0, err


# Designs


@pytest.mark.slow
def test_design_is_asked_for_as_the_message_shows(scaled, tmp_path):
    from tests.scaling.ladder.test_design import base as base_in

    file = base_in(tmp_path)
    code, _, err = scaled("plan", "--design", "--base", file)
    assert code == 2 and "write: plan --design --base ds.json --hours 1.5 --out ladder.json" in err
    words = ("plan", "--design", "--base", file, "--out", "ladder.json")
    code, _, err = scaled(*words, "--hours", "1.5")
    assert code == 2 and "or give --flops" in err
    code, _, err = scaled(*words, "--flops", "4e14")
    assert code == 0, err
    code, _, err = scaled(*words, "--flops", "4e14")
    assert code == 2 and "name a new file" in err
    code, _, err = scaled(*words[:-1], "other.json", "--flops", "4e14")
    assert code == 0, err
    raw = json.loads(file.read_text())
    raw["parallel3d"]["model"]["num_attention_heads"] = 3
    file.write_text(json.dumps(raw))
    code, _, err = scaled(*words[:-1], "third.json", "--flops", "4e14")
    assert code == 2 and "set all, and the width as a multiple of the heads" in err
