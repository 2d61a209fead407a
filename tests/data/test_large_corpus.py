"""A corpus of a thousand shards of a million documents costs a rank little to open and to read.

Its files are sparse: what is not written reads as zeros, and takes no room on the disk. Every
document has 500 tokens; of their bounds those are written that a search for some of them meets.
"""

import json
import subprocess
import sys
from bisect import bisect_left, bisect_right

import numpy as np
import pytest

from parallel3d.data.batches import num_windows
from parallel3d.data.cache import MANIFEST
from parallel3d.data.corpus import PLACE
from parallel3d.data.order import sample_index

pytestmark = pytest.mark.gloo

SHARDS = 1000
DOCUMENTS = 10**6
LENGTH = 500
ALL = SHARDS * DOCUMENTS
TRAINED = ALL * 99 // 100
END = 7
SEQUENCE = 1024
FIRST = 10**6
COUNT = 8
OPEN = f"""
import json, re, sys, time
from pathlib import Path
from parallel3d.data.batches import Batches
from parallel3d.data.corpus import Corpus
began = time.perf_counter()
corpus = Corpus.open(sys.argv[1])
training = Batches(corpus.train, {SEQUENCE}, 0)
held_out = Batches(corpus.held_out, {SEQUENCE}, 0)
seconds = time.perf_counter() - began
document = corpus.held_out.tokens[: corpus.held_out.bounds[1] - 1]
ends = [
    (batches.microbatch(*which)[1] == {END}).sum(axis=1).tolist()
    for batches, which in ((training, ({FIRST}, {COUNT})), (held_out, (0, 2)))
]
# Of this program alone: what getrusage says counts the process that started it, too.
bytes_ = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
lengths = len(corpus.train), len(corpus.held_out), len(document)
print(json.dumps([seconds, bytes_, lengths, ends]))
"""


class Met:
    """The bounds of documents, which notes those that are looked at."""

    def __init__(self):
        self.numbers = {0, TRAINED, ALL}

    def __getitem__(self, number):
        self.numbers.add(number)
        return LENGTH * number


def met_bounds():
    """The numbers of all bounds that are met on the way to the samples that are read."""
    met = Met()
    spans = [(TRAINED, ALL, 0, LENGTH - 1)]  # a document
    for first, last, indices in (
        (0, TRAINED, np.arange(FIRST, FIRST + COUNT)),
        (TRAINED, ALL, np.arange(2)),
    ):
        samples = sample_index(0, indices, num_windows(LENGTH * (last - first), SEQUENCE))
        spans += [(first, last, int(sample) * SEQUENCE, SEQUENCE + 1) for sample in samples]
    for first, last, start, count in spans:
        start += LENGTH * first
        bounds = range(first, last + 1)
        begin = bisect_right(bounds, start, key=met.__getitem__)
        end = bisect_left(bounds, start + count, key=met.__getitem__)
        met.numbers.update(range(first + begin - 1, first + end + 1))
    return sorted(met.numbers)


def sparse(path, size, written=()):
    """A file of `size` bytes; `written` has pairs: byte, and what stands there."""
    with open(path, "wb") as file:
        file.truncate(size)
        for at, data in written:
            file.seek(at)
            file.write(data)


def sparse_npy(path, dtype, count):
    with open(path, "wb") as file:
        shape = {"descr": dtype.descr, "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, shape)
        file.truncate(file.tell() + count * dtype.itemsize)


def corpus_of(folder, is_foreign):
    corpus = folder / "corpus"
    corpus.mkdir()
    bounds = [(8 * number, np.int64(LENGTH * number).tobytes()) for number in met_bounds()]
    sparse(corpus / "bounds.bin", 8 * (ALL + 1), bounds)
    meta = {
        "dtype": "uint16",
        "end_of_text": END,
        "num_train_documents": TRAINED,
        "unigram_entropy": 1.0,
        "vocab_size": 100,
    }
    if is_foreign:
        # All documents are where the first file begins.
        sparse_npy(corpus / "places.npy", PLACE, ALL)
        sparse(corpus / "starts.bin", 8 * ALL)
        meta["files"] = []
        for number in range(SHARDS):
            path = folder / f"{number}.bin"
            size = 2 * LENGTH * DOCUMENTS
            sparse(path, size)
            file = {"name": path.name, "path": str(path), "dtype": "uint16"}
            meta["files"].append(file | {"offset": 0, "size": size})
    else:
        ids = [(2 * (LENGTH * n - 1), np.uint16(END).tobytes()) for n in met_bounds() if n]
        sparse(corpus / "tokens.bin", 2 * LENGTH * ALL, ids)
    (corpus / "meta.json").write_text(json.dumps(meta))
    sizes = {path.name: [path.stat().st_size, ""] for path in corpus.iterdir()}
    (corpus / MANIFEST).write_text(json.dumps(sizes))
    return corpus


@pytest.mark.parametrize(
    "is_foreign",
    [
        pytest.param(False, id="own", marks=pytest.mark.slow),
        pytest.param(True, id="foreign"),  # it opens more files
    ],
)
def test_large_corpus_opens_in_a_second_and_100_megabytes(tmp_path, is_foreign):
    corpus = corpus_of(tmp_path, is_foreign)
    command = [sys.executable, "-c", OPEN, str(corpus)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    seconds, num_bytes, lengths, ends = json.loads(finished.stdout)
    print(f"{seconds:.2f} s, {num_bytes / 1e6:.0f} MB")
    assert lengths == [LENGTH * TRAINED, LENGTH * (ALL - TRAINED), LENGTH - 1]
    training, held_out = ends
    assert len(training) == COUNT and set(training + held_out) <= {2, 3}
    assert seconds < 1 and num_bytes < 100e6
