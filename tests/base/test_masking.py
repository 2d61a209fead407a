"""Passwords in URLs: masked in every text, and nothing else is."""

import json

import pytest

from parallel3d.base.arguments import Parser, prints_errors_as
from parallel3d.base.errors import CheckpointError, DataError, pack_error, unpack_error
from parallel3d.base.masking import mask, mask_values
from parallel3d.base.section import Problem, Problems

pytestmark = pytest.mark.pure

MASKED = {
    "https://user:secret@host/a.bin": "https://user:***@host/a.bin",
    "s3://key:secret@bucket/*.npy": "s3://key:***@bucket/*.npy",
    "s3://key:se/cr/et@bucket/a@b.npy": "s3://key:***@bucket/a@b.npy",
    "https://user:se@cr:et'@host:80/a@b": "https://user:***@host:80/a@b",
    "https://:secret@host": "https://:***@host",
    "simplecache::https://user:secret@host/a": "simplecache::https://user:***@host/a",
    "one https://a:secret@b/c, two http://d:secret@e": "one https://a:***@b/c, two http://d:***@e",
    "https://h/a?X-Amz-Signature=secret&b=1": "https://h/a?X-Amz-Signature=***&b=1",
    'p = ["https://h/a?b=1&sig=secret", "c"]': 'p = ["https://h/a?b=1&sig=***", "c"]',
    "https://h/a?sv=2&access_token=secret: 404": "https://h/a?sv=2&access_token=*** 404",
    'data.paths = ["https://a:secret@b/c", "x@y"]': 'data.paths = ["https://a:***@b/c", "x@y"]',
}
AS_THEY_ARE = [
    "https://host/a.bin",
    "https://host:8080/a@b.npy",
    "abfs://container@account.dfs.core.windows.net/a",
    "http://[::1]:80/a@b",
    'data.paths = ["https://host:8080/a", "x@y"]',
    "a:b@c",
    "https://host/a?page=2&size=3",
    "data.token_field=ids",
    "user@host: no URL",
]


@pytest.mark.parametrize("text", MASKED)
def test_password_is_masked(text):
    assert mask(text) == MASKED[text] == mask(mask(text))


@pytest.mark.parametrize("text", AS_THEY_ARE)
def test_texts_without_password_are_unchanged(text):
    assert mask(text) == text


def test_config_values_are_masked():
    config = {"a": ["s3://k:secret@b", {"b": "s3://k:secret@c"}], "d": 3, "e": None}
    assert mask_values(config) == {"a": ["s3://k:***@b", {"b": "s3://k:***@c"}], "d": 3, "e": None}


@pytest.mark.parametrize("kind", [DataError, CheckpointError])
def test_errors_are_masked(kind):
    error = kind("https://user:secret@host/a cannot be read")
    masked = "https://user:***@host/a cannot be read"
    assert str(error) == masked
    assert str(unpack_error(pack_error(error))) == masked


def test_value_is_masked_before_it_is_shortened():
    for length in range(70):
        url = f"https://{'u' * length}:secretsecretsecret@host/{'x' * 60}"
        message = str(Problems([Problem("data.paths", [url], "is wrong", "mend it")]))
        assert "sec" not in message and message.endswith(": is wrong; mend it")


def test_commands_mask_what_they_print(capsys):
    @prints_errors_as("prepare")
    def main():
        raise OSError("https://user:secret@host")

    assert main() == 2
    with pytest.raises(SystemExit):
        Parser().parse_args(["https://user:secret@host"])
    text = capsys.readouterr().err
    assert "secret" not in text and text.count("https://user:***@host") == 2, json.dumps(text)
