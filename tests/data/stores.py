"""Stores of files for tests: Python's own HTTP server with faults, and a local S3 server."""

import os
import threading
import time
from contextlib import contextmanager, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer


class _Handler(SimpleHTTPRequestHandler):
    def do_GET(self):
        store = self.server.store
        name = self.path.rpartition("/")[2]
        with store.lock:
            store.requests.append(name)
            faults = store.faults.get(name, [])
            fault = faults.pop(0) if faults else ""
        if fault == "fail":
            self.send_error(503)
            return
        self.cut = fault == "cut"
        super().do_GET()

    def copyfile(self, source, target):
        content = source.read()
        content = content[: len(content) // 2] if self.cut else content
        speed = self.server.store.speed
        began = time.monotonic()
        for first in range(0, len(content), 2**16):
            part = content[first : first + 2**16]
            if speed:
                # Not a pause for each part: on a busy machine each would last longer.
                time.sleep(max(0, began + (first + len(part)) / speed - time.monotonic()))
            with suppress(ConnectionError):  # fsspec asks for a file to see that it is there
                target.write(part)

    def log_message(self, *_):
        pass


class HttpStore:
    """The files of a folder at `url`.

    `faults` lists what happens to the next requests of a file: "fail", "cut", "" for nothing.
    `speed` is in bytes a second for each request.
    """

    def __init__(self, folder):
        self.faults = {}
        self.requests = []
        self.speed = None
        self.lock = threading.Lock()

        def handler(*args):
            return _Handler(*args, directory=str(folder))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.server.store = self
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def http_store(folder):
    store = HttpStore(folder)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def s3_store(files, bucket="corpus"):
    """Yield the URL of a bucket with the files of a list of paths, on a server of moto's."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    names = {
        "AWS_ACCESS_KEY_ID": "key-of-a-test",
        "AWS_SECRET_ACCESS_KEY": "secret-of-a-test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    before = {name: os.environ.get(name) for name in names}
    os.environ |= names
    try:
        client = boto3.client("s3")
        client.create_bucket(Bucket=bucket)
        for path in files:
            client.upload_file(str(path), bucket, path.name)
        yield f"s3://{bucket}"
    finally:
        server.stop()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
