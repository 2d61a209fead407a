"""What the steps are fed with: every sample once, on the ranks that use it, read ahead or not."""

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from parallel3d.base.errors import DataError, RankError
from parallel3d.config import RunConfig
from parallel3d.config.data import DataConfig
from parallel3d.data.batches import Batches
from parallel3d.data.corpus import Corpus, Mixture, TokenStream
from parallel3d.data.evaluation_samples import EvaluationSamples
from parallel3d.data.packing import Packing
from parallel3d.data.prepare import prepare
from parallel3d.mesh.mesh import Peers
from parallel3d.schedule.schedules import make_schedule
from parallel3d.tensor.segments import Segments
from parallel3d.train.feed import Feed
from tests.data.ids import writers

pytestmark = pytest.mark.gloo

LENGTH = 8
SIZE = 10_000
END = 7


def feed_of(corpus, place=(0, 0), *, mesh=(1, 1), schedule="gpipe", stages=1, **settings):
    """The feed of one rank of a mesh (pp, dp), and its config."""
    micro_batch = settings.pop("micro_batch", 2)
    read_ahead = settings.pop("read_ahead", 2)
    microbatches = settings.pop("microbatches", 4)
    pp, dp = mesh
    sizes = {"hidden_size": 8, "num_hidden_layers": 8, "num_attention_heads": 1, "vocab_size": 4096}
    data = {"sequence_length": LENGTH, "read_ahead": read_ahead, **settings}
    block = {
        "mesh": {"pp": pp},
        "pipeline": {"schedule": schedule, "stages_per_rank": stages},
        "model": {"family": "gpt", "max_position_embeddings": LENGTH, **sizes},
        "data": data,
        "train": {"steps": 100, "seed": 3},
    }
    raw = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": microbatches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "parallel3d": block,
    }
    config = RunConfig.from_dict(raw).resolve(pp * dp)
    plan = make_schedule(schedule, pp, config.num_microbatches, stages)
    pipeline, samples = (Peers(None, *own) for own in zip(mesh, place, strict=True))
    peers = {"pipeline": pipeline, "samples": samples, "context": Peers(None, 1, 0)}
    rank = SimpleNamespace(**peers, device=torch.device("cpu"))
    return Feed(config, rank, corpus, plan), config


def corpus_of(train, held_out):
    """A corpus without files."""
    return SimpleNamespace(
        train=train, held_out=held_out, end_of_text=END, parts=(), directory=Path("nowhere")
    )


def stream(first, count):
    """No two of its tokens are the same."""
    return TokenStream(np.arange(first, first + count, dtype=np.uint16), np.array([0, count]))


@pytest.fixture
def corpus():
    train = stream(1000, 500)
    train.tokens[::5] = END
    return corpus_of(train, stream(0, 200))


@pytest.fixture
def closed():
    """Feeds that are closed at the end; no thread may be left."""
    before = threading.active_count()
    feeds = []
    yield feeds
    for feed in feeds:
        feed.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize(
    ("pp", "schedule", "stages", "first", "last"),
    [
        (3, "gpipe", 1, 0, 2),
        (1, "gpipe", 1, 0, 0),
        (2, "interleaved", 2, 0, 1),
        (2, "v_shape", 2, 0, 0),
    ],
)
def test_each_rank_has_what_its_stages_use(
    corpus, closed, pp, schedule, stages, first, last, isolate
):
    whole = Batches(corpus.train, LENGTH, seed=3)
    for coord in range(pp):
        layout = {"mesh": (pp, 2), "schedule": schedule, "stages": stages}
        feed, _ = feed_of(corpus, (coord, 1), **layout, isolate_documents=isolate)
        closed.append(feed)
        for start in (16, 32, 48):
            step = feed.training(start)
            tokens, labels = whole.microbatch(start + 8, 8)  # after those of the first dp rank
            assert len(step) == 4
            for m, microbatch in enumerate(step):
                mine = slice(2 * m, 2 * m + 2)
                assert (microbatch.tokens is not None) == (coord == first)
                assert (microbatch.labels is not None) == (coord == last)
                assert (microbatch.segments is not None) == isolate
                if microbatch.tokens is not None:
                    assert microbatch.tokens.tolist() == tokens[mine].tolist()
                if microbatch.labels is not None:
                    assert microbatch.labels.tolist() == labels[mine].tolist()
                if isolate:
                    ends = np.cumsum(tokens[mine] == END, axis=1)
                    by_hand = np.hstack([np.zeros((2, 1), int), ends[:, :-1]])
                    expected = Segments.of(torch.from_numpy(by_hand))
                    assert microbatch.segments.lengths == expected.lengths
                    assert microbatch.segments.positions.tolist() == expected.positions.tolist()


def test_padding_is_its_own_document_and_has_no_weight(closed):
    bounds = np.cumsum([0, *np.random.default_rng(0).integers(5, 8, 200)])
    packing = Packing.make(bounds, LENGTH)
    train = TokenStream(np.arange(1000, 1000 + bounds[-1]), bounds, packing=packing)
    corpus = corpus_of(train, stream(0, 200))
    settings = {"packing": "best_fit", "isolate_documents": True, "mesh": (1, 2)}
    feeds = [feed_of(corpus, (0, dp), **settings)[0] for dp in range(2)]
    closed += feeds
    for start in (0, 16, 160):
        batch = [microbatch for feed in feeds for microbatch in feed.training(start)]
        padding = torch.cat([m.tokens for m in batch]) == 0
        assert torch.equal(padding, torch.cat([m.weights for m in batch]) == 0)
        assert padding.any() and feeds[0].padding(start) == int(padding.sum())
        first = padding & ~padding.roll(1, 1)
        positions = torch.cat([m.segments.positions for m in batch])
        assert not positions[first].any() and (positions[padding & ~first] > 0).all()


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_balanced_microbatches_have_the_samples_of_the_step(closed, packing):
    """Each sample once, with its own documents and weights; by number alike on every mesh."""
    bounds = np.cumsum([0, *np.random.default_rng(0).integers(1, 8, 200)])
    tokens = np.arange(1000, 1000 + bounds[-1])
    if packing == "none":
        tokens[bounds[1:] - 1] = END
    packed = Packing.make(bounds, LENGTH) if packing == "best_fit" else None
    train = TokenStream(tokens, bounds, packing=packed)
    corpus = corpus_of(train, stream(0, 200))
    whole = Batches(train, LENGTH, seed=3)
    by_mesh = []
    for dp in (1, 2):
        options = {"mesh": (1, dp), "packing": packing, "micro_batch": 2, "microbatches": 8 // dp}
        options |= {"isolate_documents": True, "balance_microbatches": True}
        feeds = [feed_of(corpus, (0, coord), **options)[0] for coord in range(dp)]
        closed += feeds
        by_mesh.append(steps := [])
        for start in (0, 16, 160):
            ranks = [feed.training(start) for feed in feeds]
            own = sorted((m for rank in ranks for m in rank), key=lambda m: m.number)
            assert [m.number for m in own] == list(range(8))
            rows = [row for m in own for row in m.tokens.tolist()]
            assert sorted(rows) == sorted(whole.microbatch(start, 16)[0].tolist())
            work = [[sum(n * (n + 1) / 2 for n in m.segments.lengths) for m in r] for r in ranks]
            assert all(one == sorted(one, reverse=True) for one in work)
            if packing == "best_fit":
                assert all(torch.equal(m.weights == 0, m.tokens == 0) for m in own)
                assert sum(map(sum, work)) == whole.attention_work(start, 16, [LENGTH]).sum()
            steps.append(rows)
        samples = EvaluationSamples(corpus.held_out, LENGTH, max_samples=22)
        in_order = torch.cat([m.labels for m in feeds[0].evaluation(samples, 0)[0]])
        assert in_order.tolist() == samples.batches.microbatch(0, len(in_order))[1].tolist()
    assert by_mesh[0] == by_mesh[1]


def test_ranks_between_the_first_and_the_last_read_nothing(corpus, closed, monkeypatch):
    feed, _ = feed_of(corpus, (1, 0), mesh=(3, 1))
    closed.append(feed)
    monkeypatch.setattr(Batches, "microbatch", None)
    assert [tuple(m) for m in feed.training(0)] == [(None,) * 4 + (m,) for m in range(4)]


def test_evaluations_between_steps_and_after_them(corpus, closed):
    feeds = [feed_of(corpus, read_ahead=n)[0] for n in (0, 1, 3)]
    closed += feeds
    for feed in feeds:
        # 24 samples are evaluated, of which the last batch fills up with two others.
        samples = EvaluationSamples(corpus.held_out, LENGTH, max_samples=22)
        for step in range(6):
            microbatches = feed.training(8 * step)
            expected = Batches(corpus.train, LENGTH, seed=3).microbatch(8 * step, 8)[0]
            assert torch.cat([m.tokens for m in microbatches]).tolist() == expected.tolist()
            for start in (0, 8, 16) if step % 2 else ():
                batch, documents = feed.evaluation(samples, start)
                labels = torch.cat([m.labels for m in batch])
                assert labels.tolist() == samples.batches.microbatch(start, 8)[1].tolist()
                assert documents.flatten(0, 1).tolist() == samples.documents(start, 8).tolist()


def test_step_is_one_asynchronous_copy(corpus, closed, monkeypatch):
    """For a device: out of pinned memory, into which the thread has put what it built ahead."""
    feed, _ = feed_of(corpus)
    closed.append(feed)
    device = torch.device("cuda", 1)
    pinned = []
    copies = []
    feed._mesh.device = device

    def pin(tensor):
        pinned.append((tensor, threading.current_thread().name))
        return tensor

    def to(tensor, where, non_blocking=False):
        copies.append((tensor, where, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.accelerator, "device_index", nullcontext)
    for start in (0, 8, 16):
        feed.training(start)
    feed.close()
    assert [(where, later) for _, where, later in copies] == [(device, True)] * 3
    threads = {id(tensor): name for tensor, name in pinned}
    first, *later = (threads[id(tensor)] for tensor, *_ in copies)
    assert (first, later) == ("MainThread", ["read ahead"] * 2)


def mixture_of(folder):
    """A stream of ours, one of Megatron-LM, and one of datatrove.

    No two windows are the same.
    """
    parts = [stream(1000, 700)]
    first = 2000
    for source, write in (("megatron", writers.megatron), ("datatrove", writers.datatrove)):
        (folder / source).mkdir()
        documents = []
        for count in np.random.default_rng(first).integers(1, 60, 30):
            documents.append([*range(first, first + count), END])
            first += count
        path = write(folder / source / "a.bin", documents)
        settings = {"tokenizer": "none", "vocab_size": SIZE, "end_of_text_id": END}
        settings |= {"paths": (str(path),), "cache": str(folder / "cache")}
        corpus = prepare(DataConfig(source=source, sequence_length=8, **settings))
        parts.append(Corpus.open(corpus.directory).train)
    return Mixture(tuple(parts), (0.5, 0.2, 0.3))


def test_every_sample_once_over_changing_meshes_batches_and_depths(tmp_path, closed):
    """Over dp 2 -> 1 -> 4; each one dies with steps read ahead that nobody takes."""
    mixture = mixture_of(tmp_path)
    corpus = corpus_of(mixture, stream(0, 100))
    windows = [
        {tuple(part.tokens[i : i + LENGTH + 1]) for i in range(0, len(part) - LENGTH, LENGTH)}
        for part in mixture.parts
    ]
    assert [len(w) for w in windows] == [(len(part) - 1) // LENGTH for part in mixture.parts]
    limit = Batches(mixture, LENGTH, seed=3).num_samples
    seen = []
    start = 0
    for dp, micro_batch, depth, num_steps in ((2, 3, 2, 3), (1, 5, 1, 2), (4, 1, 3, None)):
        feeds = [
            feed_of(corpus, (0, c), mesh=(1, dp), micro_batch=micro_batch, read_ahead=depth)
            for c in range(dp)
        ]
        closed += [feed for feed, _ in feeds]
        size = feeds[0][1].global_batch_size
        for _ in range(num_steps or (limit - start) // size):
            for feed, _ in feeds:
                for m in feed.training(start):
                    seen += torch.cat([m.tokens, m.labels[:, -1:]], dim=1).tolist()
            start += size
    assert limit - size < start <= limit
    seen = list(map(tuple, seen))
    assert len(set(seen)) == len(seen) == start
    of_parts = [sum(window in part for window in seen) for part in windows]
    assert sum(of_parts) == start
    shares = start * np.array(mixture.weights)
    assert np.abs(shares - of_parts).max() < 1
    # In the order that one rank has which reads nothing ahead.
    tokens, labels = Batches(mixture, LENGTH, seed=3).microbatch(0, start)
    assert seen == list(map(tuple, np.hstack([tokens, labels[:, -1:]]).tolist()))


def test_read_ahead_error_is_raised_in_its_step(corpus, closed, monkeypatch):
    microbatch = Batches.microbatch

    def broken(self, first, count):
        if first == 16:
            raise DataError("ids.bin is cut short; copy it again")
        return microbatch(self, first, count)

    monkeypatch.setattr(Batches, "microbatch", broken)
    feed, _ = feed_of(corpus, read_ahead=2)
    closed.append(feed)
    feed.training(0)
    feed.training(8)
    message = r"^ids\.bin is cut short; copy it again \(in samples 16 to 23\)$"
    with pytest.raises(RankError, match=message):
        feed.training(16)
    feed.training(24)
