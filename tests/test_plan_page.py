"""The planner's page (docs/plan.md) has the rows of the command, in a headless Chromium."""

import json
import math
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread

import pytest

pytestmark = [pytest.mark.pure, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
BUNDLE = ROOT / "build/plan_page/files.js"
A100 = "A100-SXM4-80GB"
H100 = "H100-SXM5-80GB"
REQUESTS = [
    ("gpt2-124m", A100, 8, ""),
    ("gpt2-124m", "V100-SXM2-16GB", 4, "--bf16.enabled false --fp16.enabled true"),
    ("gpt2-1.5b", "A100-SXM4-40GB", 16, "--rows 5"),
    ("pythia-70m", A100, 8, "--rows 3"),
    ("gpt2-1.5b", "MI300X", 8, "--fix zero_stage=3 --rows 4"),
    ("qwen3-0.6b", "GB200-NVL72", 4, "--rows 6"),
    ("llama-8b", H100, 8, "--mesh.pp 1 --mesh.tp 2 --mesh.dp 4 --rows 2"),
    ("llama-8b", "H200-SXM-141GB", 8, "--fix tp=2 cp=1 recompute=none --rows 2"),
    ("gpt3-13b", A100, 64, "--fix pp=4 dp=8 tp=2 schedule=one_f_one_b recompute=none"),
    ("gpt3-13b", "V100-SXM2-16GB", 1, "--bf16.enabled false --fp16.enabled true --fix pp=1"),
]
DRIVER = """<script>
const answers = [], status = document.getElementById("plan-status");
const settled = () => new Promise((resolve) => new MutationObserver((_, watch) => {
  if (["ready", "done", "error"].includes(status.dataset.state)) { watch.disconnect(); resolve(); }
}).observe(status, {attributes: true}));
(async () => {
  if (status.dataset.state !== "ready") await settled();
  for (const [model, hardware, devices, words] of REQUESTS) {
    const value = {model, hardware, devices, words};
    at("model").value = model;
    pick();
    for (const name in value) at(name).value = value[name];
    self.planJson = "null";
    plan();
    await settled();
    answers.push(status.dataset.state === "done" ? JSON.parse(planJson) : status.textContent);
  }
  await fetch("answers", {method: "POST", body: JSON.stringify(answers)});
})();
</script>"""


@pytest.fixture(scope="module")
def bundle():
    """Build the bundle, if npm is there."""
    if not shutil.which("npm"):
        pytest.skip("npm is missing: it has Pyodide's files")
    built = subprocess.run(
        [sys.executable, "docs/plan_page/build.py"], cwd=ROOT, capture_output=True, text=True
    )
    if built.returncode:
        pytest.skip(f"Pyodide or the wheels cannot be downloaded: {built.stderr[-300:]}")


def rows_of_the_command(name, hardware, devices, words):
    """Return what `parallel3d plan --json` prints."""
    command = [sys.executable, "-m", "parallel3d", "plan", "--json", "--config", f"{name}.json"]
    done = subprocess.run(
        [*command, "--hardware", hardware, "--devices", str(devices), *words.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout) if done.stdout else {"error": done.stderr}


def page():
    """Return the page without the site around it, with a script that fills in the form."""
    html = (ROOT / "docs/plan.md").read_text()
    html = html[html.index("<form") :].replace("plan_page/", "")
    return "<!doctype html>" + html + DRIVER.replace("REQUESTS", json.dumps(REQUESTS))


def different(value, expected, at=""):
    """Return the places where two JSON values differ, beyond the rounding of a sum."""
    if isinstance(expected, dict) and isinstance(value, dict) and [*value] == [*expected]:
        places = []
        for key in expected:
            places += different(value[key], expected[key], f"{at}.{key}")
        return places
    if isinstance(expected, list) and isinstance(value, list) and len(value) == len(expected):
        places = []
        for i, (one, other) in enumerate(zip(value, expected, strict=True)):
            places += different(one, other, f"{at}[{i}]")
        return places
    if isinstance(expected, float) and isinstance(value, float | int):
        return [] if math.isclose(value, expected, rel_tol=1e-12, abs_tol=1e-10) else [at]
    return [] if value == expected and type(value) is type(expected) else [at]


class Site(BaseHTTPRequestHandler):
    """Serves the page and its two scripts, and takes its answers."""

    def do_GET(self):
        files = {
            "/": lambda: page().encode(),
            "/files.js": BUNDLE.read_bytes,
            "/page.js": (ROOT / "docs/plan_page/page.js").read_bytes,
        }
        self.send_response(200 if self.path in files else 404)
        self.send_header("Content-Type", "text/javascript" if "js" in self.path else "text/html")
        self.end_headers()
        if self.path in files:
            self.wfile.write(files[self.path]())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()
        self.server.answers.put(json.loads(body))

    def log_message(self, *_):
        pass


@pytest.mark.timeout(900)
def test_page_has_the_rows_of_the_command(bundle, tmp_path):
    """All choices, bytes and texts; seconds within rounding: from 3.12 on sum() compensates."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("chromium is missing")
    wanted = [rows_of_the_command(*request) for request in REQUESTS]
    assert len(wanted) == 11 and all("plans" in answer for answer in wanted)
    assert wanted[-1]["least"] and not any(plan["fits"] for plan in wanted[-1]["plans"])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.answers = Queue()
    Thread(target=server.serve_forever, daemon=True).start()
    browser = subprocess.Popen(
        [
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--remote-debugging-port=0",
            f"--user-data-dir={tmp_path}",
            f"http://127.0.0.1:{server.server_port}/",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        answers = server.answers.get(timeout=800)
    finally:
        browser.terminate()
        browser.wait()
        server.shutdown()
    for request, answer, expected in zip(REQUESTS, answers, wanted, strict=True):
        assert different(answer, expected) == [], request
