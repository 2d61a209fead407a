"""Tables that tell no law: exit code 2 and one message, nothing on standard output."""

import pytest

from parallel3d.extras.report import page
from tests.scaling.cases import chinchilla, write_csv

pytestmark = pytest.mark.pure

GOOD = chinchilla(noise=0.01, budgets=4, sizes=4)
COLUMNS = {"params": GOOD.params, "tokens": GOOD.tokens, "loss": GOOD.loss}


def changed(**columns):
    return COLUMNS | columns


ONE = [1e8] * 16
TABLES = {
    "too few points": ({k: v[:4] for k, v in COLUMNS.items()}, "4 points: fewer than the 5"),
    "one size": (
        changed(params=ONE),
        "1 different model sizes (1e+08); the parametric law needs 3",
    ),
    "two sizes": (changed(params=[1e8, 2e8] * 8), "2 different model sizes (1e+08, 2e+08)"),
    "one length": (changed(tokens=ONE), "1 different numbers of tokens (1e+08)"),
    "one budget": (changed(tokens=1e20 / GOOD.params), "1 different FLOP budgets (6e+20)"),
    "one loss": (changed(loss=[2.5] * 16), "all have the same loss, 2.5"),
    "loss that rises": (changed(loss=2 + GOOD.params * GOOD.tokens / 1e20), "comes out as 0"),
    "no loss": ({"params": ONE, "tokens": ONE}, "--loss-column: is missing"),
    "no tokens": ({"params": ONE, "loss": ONE}, "found only: params; name columns with"),
    "all diverged": (changed(loss=["nan"] * 16), "no row can be used; line 2: loss = 'nan'"),
    "too many diverged": (
        changed(loss=[*GOOD.loss[:4], *["inf"] * 12]),
        "4 points: fewer than the 5 parameters of the parametric law; add runs; dropped rows: ",
    ),
    "negative": (changed(loss=-GOOD.loss), "is not a finite number above 0"),
    "words": (changed(params=["big"] * 16), "params = 'big' is not a finite number"),
}


@pytest.fixture
def refused(scaled, tmp_path):
    """Gives what the command says where it must refuse."""

    def run(*arguments: str) -> str:
        code, out, err = scaled(*arguments)
        assert (code, out) == (2, ""), err
        assert err.startswith("scale") and err.count("\n") == 1
        assert "; " in err or "use one of" in err  # a remedy
        assert not (tmp_path / "fit.json").exists()
        return err

    return run


@pytest.mark.parametrize("name", TABLES)
def test_table_without_a_law_is_refused(refused, tmp_path, name):
    columns, words = TABLES[name]
    write_csv(tmp_path / "runs.csv", **columns)
    assert words in refused("fit", "runs.csv", "--bootstraps", "0")


FLAGS = [
    (
        ("--n-column", "parms"),
        '--n-column = "parms": is not a column of runs.csv; the nearest one is "params"',
    ),
    (("--loss-column", "x"), "use params, tokens, loss"),
    (("--where", "params"), "has no value; write COLUMN=VALUE"),
    (("--where", "loss=9"), "matches no row; use a value of loss: "),
    (("--law", "kaplan"), "--law = 'kaplan': use one of"),
    (("--delta", "0"), "--delta = 0: must be a number above 0"),
    (("--bootstraps", "-1"), "--bootstraps = -1: is too small"),
    (("--weighted", "--law", "isoflop"), "--weighted: is not supported by the isoflop law"),
    (("--law", "data-constrained"), "--unique-column: is missing"),
    (("--law", "data-constrained", "--base", "base.json"), "holds no parametric law; use its"),
    (("--law", "best-value"), "--setting-column: is missing"),
    (("--weighted",), "the standard errors of the losses are not known"),
    (("--drop-largest-losses", "12"), "4 points: fewer than the 5"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "words"), FLAGS)
def test_bad_flag_gives_one_message(refused, tmp_path, flags, words):
    write_csv(tmp_path / "runs.csv", **COLUMNS)
    (tmp_path / "base.json").write_text('{"E": 1, "A": 400}')
    assert words in refused("fit", "runs.csv", "--bootstraps", "0", *flags)


def test_missing_package_is_named_with_its_remedy(refused, tmp_path, monkeypatch):
    write_csv(tmp_path / "runs.csv", **COLUMNS)
    monkeypatch.setattr(page, "find_spec", lambda name: None if name == "scipy" else name)
    err = refused("fit", "runs.csv")
    assert "scipy is not installed; run: pip install 'parallel3d[scaling]'" in err


FILES = {
    "absent": (None, "cannot read runs.csv: No such file"),
    "empty": (b"", "has no rows"),
    "header alone": (b"params,tokens,loss\n", "has no rows"),
    "binary": (bytes(range(256)), "convert it to UTF-8"),
    "ragged": (b"params,tokens,loss\n1,2,3,4\n", "line 2: has more cells than the 3 of the first"),
    "cut short": (b"params,tokens,loss\n1,2\n", "line 2: loss = '' is not a finite number"),
    "twice": (b"loss,loss\n1,2\n", "runs.csv: has two columns of one name: loss, loss; rename"),
    "no objects": (b"[1, 2]", "row 1: is not an object"),
    "cut off": (b'[{"loss": 1}', "is not valid JSON"),
    "cut line": (b'{"loss": 1}\n{"lo', "is not valid JSON"),
}


@pytest.mark.parametrize("name", FILES)
def test_invalid_table_is_refused(refused, tmp_path, name):
    content, words = FILES[name]
    if content is not None:
        (tmp_path / "runs.csv").write_bytes(content)
    assert words in refused("fit", "runs.csv")
