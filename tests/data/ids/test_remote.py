"""URLs of shards: what is wrong with one is told by its name, and no password is shown."""

import json
import socket
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from parallel3d.base.errors import DataError
from parallel3d.data import remote, streams
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


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n"


@contextmanager
def silent_server(first=b""):
    """The URL of a file of a server that accepts, sends `first` to each request, and no more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def accept():
            with suppress(OSError):  # it was closed
                while True:
                    connection, _ = server.accept()
                    connections.append(connection)
                    connection.recv(4096)
                    connection.sendall(first)

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/ids.npy"
        for connection in connections:
            connection.close()


@pytest.mark.parametrize(
    ("first", "question"),
    [
        (b"", lambda url, folder: remote.is_file(url)),
        (b"", lambda url, folder: remote.matching_urls(url)),
        (b"", lambda url, folder: by_url(url, folder)),
        (HEAD, lambda url, folder: streams._download(url, folder)),
        (HEAD + bytes(100), lambda url, folder: streams._download(url, folder)),
    ],
    ids=["is_file", "matching_urls", "prepare", "no byte of a file", "a part of a file"],
)
def test_silent_server_is_an_error_after_a_while(first, question, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(remote, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(streams, "ATTEMPTS", 2)
    with silent_server(first) as url, pytest.raises(DataError) as caught:
        question(url, tmp_path)
    assert f"{url} cannot be read (the server sent nothing for 0 s)" in str(caught.value)
    if first:
        assert "attempt 1 of 2: " in capsys.readouterr().err
    assert not list(tmp_path.glob("ids.npy"))


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
