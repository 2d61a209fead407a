"""A server's answer is the reason that a message gives, not that the file was not found."""

import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from parallel3d.base.errors import DataError
from parallel3d.data.remote import matching_urls

pytestmark = pytest.mark.gloo


class Answers(BaseHTTPRequestHandler):
    """Answers every request with one status."""

    def __init__(self, status, *args):
        self.status = status
        super().__init__(*args)

    def do_GET(self):
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args):
        """Print nothing."""


@contextmanager
def server_with(status):
    with HTTPServer(("127.0.0.1", 0), partial(Answers, status)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (404, "'.*a.jsonl' matches no file; use the URL"),
        (403, r"a\.jsonl cannot be read \(403, .*; check its name, your credentials and the"),
        (500, r"a\.jsonl cannot be read \(500, .*; check its name, your credentials and the"),
    ],
)
def test_answer_of_a_server_is_named(status, message):
    with server_with(status) as address, pytest.raises(DataError, match=message):
        matching_urls(f"{address}/a.jsonl")
