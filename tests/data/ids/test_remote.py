"""URLs of shards: what is wrong with one is told by its name, and no password is shown."""

import json
from pathlib import Path

import pytest

from parallel3d.base.errors import DataError
from parallel3d.data import streams
from parallel3d.data.prepare import prepare, prepare_manifests
from parallel3d.data.show import as_text, samples, summarise
from tests.data.ids import locked, writers
from tests.data.ids.test_formats import DOCUMENTS, config_of

pytestmark = pytest.mark.gloo


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(streams, "FIRST_PAUSE_SECONDS", 0.01)


def part_of(url, folder):
    return {"source": "tokens", "paths": (str(url),), "stream": True, "manifest": str(folder / "m")}


def by_url(url, folder):
    settings = part_of(url, folder) | {"held_out_fraction": 0, "cache": str(folder / "cache")}
    config = config_of(path=Path("x"), **settings)
    prepare_manifests(config)
    return prepare(config)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file://{folder}/none.bin", "matches no file"),
        ("nothing-known://a/b.bin", r"nothing-known://a/b\.bin cannot be read .*known"),
        ("adl://a/b.bin", r"adl://a/b\.bin cannot be read: .*pip install parallel3d\[remote\]"),
    ],
)
def test_url_errors_name_the_url(url, message, tmp_path):
    with pytest.raises(DataError, match=message):
        by_url(url.format(folder=tmp_path), tmp_path)


def test_password_in_a_url_is_never_shown(tmp_path):
    path = writers.numpys(tmp_path / "ids.npy", [[*ids, writers.END] for ids in DOCUMENTS])
    url = f"{locked.OPEN}{path}"
    corpus = by_url(url, tmp_path)
    part = part_of(url, tmp_path)
    mixture = config_of("mixture", Path("x"), paths=(), mixture=(part, part), held_out_fraction=0)
    mixed = prepare(mixture.model_copy(update={"cache": str(tmp_path / "cache")}))
    for shown in (
        json.dumps([corpus.summary(), mixed.summary(), samples(corpus, 8, 0, 3)]),
        as_text(summarise(mixed, None)),
    ):
        assert "secret" not in shown
    assert corpus.name(0).startswith(f"locked://user:***@host{path}, ")
    # Its library shows the URL in its own messages.
    wrong = url.replace("secret", "secreto")
    for refused in (wrong, f"{locked.OPEN}{tmp_path}/none.npy"):
        with pytest.raises(DataError, match=r"user:\*\*\*@host") as caught:
            by_url(refused, tmp_path)
        assert "secret" not in str(caught.value)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"user:\*\*\*@host.* cannot be read") as caught:
        by_url(url, tmp_path)
    assert "secret" not in str(caught.value)
