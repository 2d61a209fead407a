"""Writers of other programs' files of ids, with numpy and struct alone."""

import struct
from pathlib import Path

import numpy as np

END = 7  # the end-of-text id
SIZE = 300  # ids in the vocabulary


def some_documents(count=40, size=SIZE, seed=0):
    """Lists of ids without the end-of-text, of any length but 0; one comes twice."""
    rng = np.random.default_rng(seed)
    lengths = [1, 2, 700, *rng.integers(1, 60, count - 4)]
    documents = [rng.integers(END + 1, size, n).tolist() for n in lengths]
    return [*documents, documents[5]]


def megatron(path: Path, documents, dtype="uint16", sentences=1, modes=False):
    """The .bin and .idx of today; each document in so many sequences."""
    sequences = []
    first = [0]
    for ids in documents:
        sequences += [part.tolist() for part in np.array_split(ids, sentences)] if ids else []
        first.append(len(sequences))
    code = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}[dtype]
    lengths = [len(ids) for ids in sequences]
    size = np.dtype(dtype).itemsize
    begins = [size * sum(lengths[:i]) for i in range(len(lengths))]
    path.write_bytes(b"".join(np.array(ids, dtype).tobytes() for ids in sequences))
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, len(sequences), len(first))
        + np.array(lengths, "<i4").tobytes()
        + np.array(begins, "<i8").tobytes()
        + np.array(first, "<i8").tobytes()
        + (bytes(len(sequences)) if modes else b"")
    )
    return path


def old_megatron(path: Path, documents, dtype="int32"):
    """The .bin and .idx of IndexedDataset; a document is a sequence."""
    code = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5}[dtype]
    count = len(documents)
    lengths = [len(ids) for ids in documents]
    path.write_bytes(b"".join(np.array(ids, dtype).tobytes() for ids in documents))
    path.with_suffix(".idx").write_bytes(
        b"TNTIDX\0\0"
        + struct.pack("<6Q", 1, code, np.dtype(dtype).itemsize, count, count, count + 1)
        + np.arange(count + 1, dtype="<i8").tobytes()
        + np.cumsum([0, *lengths]).astype("<i8").tobytes()
        + np.array(lengths, "<i8").tobytes()
        + np.arange(count + 1, dtype="<i8").tobytes()
    )
    return path


def datatrove(path: Path, documents, dtype="uint16", index=True):
    """The .ds with its .index and .metadata."""
    ends = np.cumsum([len(ids) for ids in documents])
    path.write_bytes(b"".join(np.array(ids, dtype).tobytes() for ids in documents))
    if index:
        Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    text = f"gpt2|{np.dtype(dtype).itemsize}\n{ends[-1]}\n{ends[-1] / 1000:.3g} kT"
    Path(f"{path}.metadata").write_text(text)
    return path


def raw(path: Path, documents, dtype="uint16"):
    """A flat array without a header; the documents hold their ends."""
    np.concatenate([np.array(ids, dtype) for ids in documents]).tofile(path)
    return path


def numpys(path: Path, documents, dtype="uint16"):
    """A flat array as numpy.save writes it."""
    with open(path, "wb") as file:
        np.save(file, np.concatenate(documents).astype(dtype))
    return path


def llm_c(path: Path, documents, magic=20240520, version=1, dtype="uint16"):
    """A file of llm.c: an end-of-text comes before each document."""
    ids = np.concatenate([[END, *ids] for ids in documents])
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(ids)
    path.write_bytes(head.tobytes() + ids.astype(dtype).tobytes())
    return path


def arrow(path: Path, documents, kind="int32", batch=7):
    """A stream of Arrow, with another column before that of the ids."""
    import pyarrow as pa

    columns = {"n": range(len(documents)), "input_ids": documents}
    schema = pa.schema({"n": pa.int64(), "input_ids": pa.list_(getattr(pa, kind)())})
    table = pa.table(columns, schema=schema)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
        stream.write_table(table, max_chunksize=batch)
    return path
