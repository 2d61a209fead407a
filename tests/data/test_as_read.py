"""A stream that is counted as it is read has the samples of its documents, packed by window."""

import shutil
from time import monotonic, sleep

import numpy as np
import pytest

from parallel3d.base.errors import DataError
from parallel3d.config.data import DataConfig
from parallel3d.data import streams
from parallel3d.data.batches import Batches
from parallel3d.data.order import mix, sample_index
from parallel3d.data.prepare import prepare, prepare_manifests
from tests.data.test_streams import (
    EPOCHS,
    LENGTH,
    SEED,
    SHARDS,
    digest,
    read_through_kills,
    rows_of_text,
    streamed,
)

pytestmark = pytest.mark.gloo


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(streams, "FIRST_PAUSE_SECONDS", 0.01)


def texts_of(number):
    """The documents of a shard: some are longer than many samples."""
    rng = np.random.default_rng(number)
    sizes = [1, *rng.integers(1, 40, 3 + number).tolist(), 60]
    return [" ".join(f"w{x}" for x in rng.integers(0, 999, size)) for size in sizes]


def as_read(tmp_path, **settings):
    settings = rows_of_text(tmp_path, *map(texts_of, range(SHARDS)), **settings)
    settings = settings.model_copy(update={"count": "as-read", "stream_window": 3})
    prepare_manifests(settings)
    return settings


def plain_samples(settings):
    """The samples of the epochs, written again: one list of documents for each window of shards."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer)
    windows = -(-SHARDS // settings.stream_window)
    rows = []
    for epoch in range(EPOCHS):
        shards = sample_index(SEED ^ 0x5348415244, epoch * SHARDS + np.arange(SHARDS), SHARDS)
        for window in range(windows):
            first = window * SHARDS // windows
            end = (window + 1) * SHARDS // windows
            texts = [text for shard in sorted(shards[first:end]) for text in texts_of(shard)]
            key = SEED ^ int(mix(np.array([window], np.uint64))[0]) if window else SEED
            order = sample_index(key, epoch * len(texts) + np.arange(len(texts)), len(texts))
            ids = []
            for number in order:
                ids += [*tokenizer.encode(texts[number]), tokenizer.eos_token_id]
            count = (len(ids) - 1) // LENGTH
            places = (epoch * windows + window) * count + np.arange(count)
            rows += [
                ids[place * LENGTH : (place + 1) * LENGTH + 1]
                for place in sample_index(SEED ^ 0x53414D504C45, places, count)
            ]
    return np.array(rows)


def test_stream_counted_as_read_has_the_packed_documents_of_each_window(tmp_path):
    settings = as_read(tmp_path)
    plain = plain_samples(settings)
    least = {"stream_cache_bytes": prepare(settings).train.tokens.num_bytes_needed}
    least |= {"cache": str(tmp_path / "least")}
    for layout, changes in (((40, 1), {}), ((28, 4), least)):
        for folder in (tmp_path / "manifest").glob("counts"):
            shutil.rmtree(folder)
        read = streamed(settings.model_copy(update=changes), *layout, 0, len(plain))
        assert digest(read) == digest(plain)
    # It resumes in the last epoch with the counts of other runs, which fetches few shards; without
    # them, and if they cannot be written, shards are counted again.
    start = len(plain) - 60
    counts = tmp_path / "manifest/counts"
    assert len([*counts.iterdir()]) == SHARDS
    for name in ("counted", "counts lost"):
        if name == "counts lost":
            shutil.rmtree(counts)
            counts.touch()
        resumed = settings.model_copy(update={"cache": str(tmp_path / name)})
        assert digest(streamed(resumed, 28, 4, start, len(plain))) == digest(plain[start:])
        num_fetched = len([*(tmp_path / name / "streams").glob("*/ids.bin")])
        if name == "counts lost":
            assert num_fetched == SHARDS
        else:
            assert num_fetched < SHARDS


def test_next_window_is_fetched_while_one_is_read(tmp_path):
    settings = as_read(tmp_path)
    batches = Batches(prepare(settings).train, LENGTH, SEED)
    batches.microbatch(0, 1)
    deadline = monotonic() + 20
    # Of 8 shards in windows of 3, the first two have 5.
    while len([*(tmp_path / "cache/streams").glob("*/ids.bin")]) < 5:
        assert monotonic() < deadline
        sleep(0.01)
    batches.close()


@pytest.mark.slow
def test_stream_counted_as_read_resumes_after_five_kills(tmp_path):
    settings = as_read(tmp_path)
    plain = plain_samples(settings)
    end = len(plain) // EPOCHS
    assert digest(read_through_kills(settings, tmp_path, end)) == digest(plain[:end])


def test_manifest_without_counts_estimates_the_tokens(tmp_path):
    settings = as_read(tmp_path)
    corpus = prepare(settings)
    assert corpus.facts.count == "as-read"
    counted = settings.model_copy(update={"count": "manifest"})
    with pytest.raises(DataError, match=r"data\.count = 'manifest': .* made with 'as-read'; .*"):
        prepare(counted)
    prepare_manifests(counted)
    exact = prepare(counted)
    assert corpus.num_tokens == pytest.approx(exact.num_tokens, rel=0.1)
    assert corpus.num_documents == exact.num_documents and corpus.key != exact.key


def test_lost_shard_or_wrong_counts_end_a_run_counted_as_read(tmp_path):
    settings = as_read(tmp_path)
    lost = tmp_path / "texts/4.jsonl"
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(DataError, match=r"4\.jsonl does not exist.*the manifest again"):
        streamed(settings, 40)
    assert not [*(tmp_path / "cache/streams").glob("*.lost")]
    lost.write_bytes(content)
    (tmp_path / "manifest/counts").mkdir(exist_ok=True)
    for path in (tmp_path / "manifest/counts").iterdir():
        path.unlink()
    (tmp_path / "manifest/counts/4-77").touch()
    with pytest.raises(DataError, match=r"4\.jsonl has [\d,]+ tokens, but 77 were counted"):
        streamed(settings, 40)


def test_too_few_tokens_for_a_sample_are_refused(tmp_path):
    # The estimate is enough for many samples, the tokens of a window are not.
    settings = rows_of_text(tmp_path, *[["w1 w2"]] * 8, count="as-read", stream_window=1)
    prepare_manifests(settings)
    with pytest.raises(
        DataError, match=r"stream_window = 1 shards has a sample of 16 tokens; raise"
    ):
        streamed(settings, 4, 1, 0, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stream": False, "manifest": ""}, r'count = "as-read": is for streams of text; .* add'),
        ({"token_field": "ids", "source": "parquet"}, r"is for streams of text; remove it"),
        ({"fim": {}}, r'fim = .*: cannot be combined with count "as-read"; use count "manifest"'),
    ],
)
def test_settings_that_need_counts_are_refused(settings, message):
    data = {"source": "jsonl", "paths": "a", "stream": True, "manifest": "m", "tokenizer": "t"}
    with pytest.raises(ValueError, match=message):
        DataConfig(**data | {"sequence_length": 8, "count": "as-read"} | settings)
