"""Preparing the corpus or mixture of a config, and publishing it in the content-addressed cache."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.base.masking import mask
from parallel3d.config.data import (
    DataConfig,
    PartConfig,
    weight_changes,
    weights_at,
    yields_token_ids,
)
from parallel3d.data import packing
from parallel3d.data.cache import cache_root, digest_of, published
from parallel3d.data.chat import find_chat
from parallel3d.data.corpus import Corpus, Mixture, entropy
from parallel3d.data.corpus_folder import (
    FORMAT,
    TRAINING_BYTES,
    Recipe,
    contents_of,
    copy_tokenizer,
    train,
)
from parallel3d.data.documents import Documents, find_documents
from parallel3d.data.facts import Facts
from parallel3d.data.fim import ROOM, Fim
from parallel3d.data.ids.validate import DIGEST
from parallel3d.data.order import whole_shares
from parallel3d.data.sources import Progress, find_files, has_split, no_progress
from parallel3d.data.split import num_common, split_documents
from parallel3d.data.streams import check_room, make_manifest, open_shard_cache, open_stream
from parallel3d.data.tokenised import Source, Tokenised, TokenRecipe, find_tokens, vocabulary_of
from parallel3d.data.tokenizer import check_once, save_tokenizer, tokenizer_directory


def prepare(config: DataConfig, progress: Progress = no_progress) -> Corpus:
    """Return the corpus or mixture that `config` describes, from the cache if possible.

    A corpus is cached under a digest of its documents' contents, tokenizer and split; names, times
    and the sequence length do not matter. If several processes prepare the same corpus, one works
    and the others wait. Raises DataError. Completed shards survive a failure, and the next
    preparation continues from them.

    Validation sets are corpora with the same tokenizer whose documents are all held out. Their
    facts have `num_in_training`, the number of their documents that are also in the training part.
    """
    with tokenizer_directory(config.tokenizer) as tokenizer:
        return _Preparation(config, tokenizer, progress).run()


def prepare_manifests(config: DataConfig, progress: Progress = no_progress) -> None:
    """Read the shards of a config's streams, and write their manifests; see make_manifest."""
    with tokenizer_directory(config.tokenizer) as tokenizer:
        for part in config.mixture or (config,):
            if part.stream:
                make_manifest(config, part, tokenizer, progress)


def pack(corpus: Corpus, config: DataConfig, progress: Progress = no_progress) -> Corpus:
    """Return the corpus with the packing of its training part, which is cached.

    It is a function of the documents, data.sequence_length and whether data.fim is set. Raises
    DataError if the cache cannot be written.
    """
    if config.packing == "none":
        return corpus
    if isinstance(corpus.train, Mixture):
        parts = tuple(pack(part, config, progress) for part in corpus.parts)
        streams = tuple(part.stream("train") for part in parts)
        return replace(corpus, parts=parts, train=replace(corpus.train, parts=streams))
    stream = corpus.stream("train")
    length = config.sequence_length
    room = ROOM if config.fim else 0
    key = digest_of(packing.FORMAT, corpus.key, length, room)
    directory = cache_root(config.cache) / "packings" / key
    with published(directory, progress) as folder:
        if folder:
            progress("packing documents", 0, 1)
            packing.Packing.make(np.asarray(stream.bounds), length, room).save(folder)
    packed = packing.Packing.open(directory, length, room)
    facts = packed.add_facts(corpus.facts, np.asarray(stream.bounds))
    return replace(corpus, train=replace(stream, packing=packed), facts=facts)


class _Preparation:
    """One call of `prepare`; `tokenizer` is the directory of an existing tokenizer, if any."""

    def __init__(self, config: DataConfig, tokenizer: Path | None, progress: Progress) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.progress = progress
        self.cache = cache_root(config.cache)
        self.shards = open_shard_cache(config)

    def run(self) -> Corpus:
        """Return the corpus, with its validation sets."""
        config = self.config
        parts: tuple[Source, ...] = config.mixture or (config,)
        progress_of = [self._progress_of(number, len(parts)) for number in range(len(parts))]
        sources: list[Documents | Tokenised | None] = []
        for number, part in enumerate(parts):
            with _prefix_errors(f"data.mixture.{number}") if config.mixture else nullcontext():
                sources.append(None if part.stream else self._find(part, progress_of[number]))
        local = [source for source in sources if source is not None]
        tables = [source.table for source in local]
        fraction = 0 if config.streams else config.held_out_fraction
        held_out = split_documents(tables, fraction, config.held_out_seed)
        # A mixture's tokenizer is trained on all parts; a single corpus trains its own.
        shares = whole_shares(weights_at(config, 0)) if config.mixture else []
        if config.mixture and config.tokenizer == "train":
            self.tokenizer = self._train_tokenizer(local, held_out, shares)
        masks = iter(held_out)
        corpora = []
        for part, source, shown in zip(parts, sources, progress_of, strict=True):
            if source is None:
                corpora.append(open_stream(config, part, self.tokenizer, self.shards))
            else:
                corpora.append(self._build(source, next(masks), shown))
        if config.streams:
            check_room(config, corpora)
        corpus = self._mix(corpora, shares) if config.mixture else corpora[0]
        digests = [table["digest"][~apart] for table, apart in zip(tables, held_out, strict=True)]
        training = np.concatenate([np.empty(0, DIGEST), *digests])
        if config.tokenizer == "train":
            self.tokenizer = corpus.tokenizer_directory
        sets = {}
        for name, section in validation_sets(config).items():
            setting = "validation." if name in config.validation else "validation_split: "
            with _prefix_errors(f"data.{setting}{name}"):
                sets[name] = self._validation_set(section, training)
        Fim.of(config.fim, corpus)  # refuses a tokenizer without the special tokens
        return pack(replace(corpus, validation=sets), config, self.progress)

    def _find(self, section: Source, progress: Progress) -> Documents | Tokenised:
        """Return the documents of a source of text or of token ids; not for mixtures."""
        config = self.config
        if section.source == "chat":
            assert self.tokenizer, "the config was checked"
            return find_chat(config, section.paths, self.tokenizer, self.cache, progress)
        if yields_token_ids(section):
            vocabulary = vocabulary_of(config, self.tokenizer)
            return find_tokens(section, vocabulary, self.cache, progress)
        files = find_files(section, config.max_line_bytes)
        if self.tokenizer:
            check_once(self.tokenizer, self.cache)  # before minutes of reading
        return find_documents(files, self.cache, progress, (config.on_error, config.max_skipped))

    def _build(
        self, source: Documents | Tokenised, held_out: np.ndarray, progress: Progress
    ) -> Corpus:
        """Return the corpus of these documents, with a summary of the skipped ones."""
        recipe: Recipe | TokenRecipe
        if isinstance(source, Tokenised):
            recipe = TokenRecipe(source, held_out, self.tokenizer)
        else:
            recipe = Recipe(source, held_out, self.tokenizer, self.config.vocab_size)
        directory = self.cache / "corpora" / recipe.key()
        unfinished = self.cache / "unfinished" / directory.name
        with published(directory, progress) as folder:
            if folder:
                recipe.fill(folder, unfinished, self.config.workers, progress)
        if folder:
            # Shards are needed until the corpus is complete.
            shutil.rmtree(unfinished, ignore_errors=True)
            with suppress(OSError):
                unfinished.parent.rmdir()
        corpus = Corpus.open(directory)
        if source.skips is None:
            return corpus
        return replace(corpus, facts=source.skips.add_to(corpus.facts))

    def _validation_set(self, section: PartConfig, training: np.ndarray) -> Corpus:
        source = self._find(section, self.progress)
        corpus = self._build(source, np.ones(len(source), dtype=bool), self.progress)
        common = num_common(source.table["digest"], training)
        return replace(corpus, facts=replace(corpus.facts, num_in_training=common))

    def _train_tokenizer(
        self,
        sources: Sequence[Documents | Tokenised],
        held_out: Sequence[np.ndarray],
        shares: Sequence[int],
    ) -> Path:
        """Train the tokenizer of a mixture on text in the proportions of the shares."""
        budgets = [TRAINING_BYTES * share / sum(shares) for share in shares]
        texts = [
            (source, is_held_out, budget)
            for source, is_held_out, budget in zip(sources, held_out, budgets, strict=True)
            if isinstance(source, Documents)
        ]
        vocab_size = self.config.vocab_size
        key: list[object] = [FORMAT, vocab_size, *shares]
        for source, is_held_out, _ in texts:
            key += contents_of(source.table, is_held_out)
        directory = self.cache / "tokenizers" / digest_of(*key)
        with published(directory, self.progress) as folder:
            if folder:
                save_tokenizer(train(texts, vocab_size, self.progress), folder)
        return directory

    def _mix(self, corpora: Sequence[Corpus], shares: Sequence[int]) -> Corpus:
        """Return the mixture of prepared corpora."""
        first = corpora[0]
        weights = [share / sum(shares) for share in shares]
        parts = []
        for corpus, weight, section in zip(corpora, weights, self.config.mixture, strict=True):
            parts.append(
                {
                    "corpus": self._name(corpus.directory),
                    "weight": weight,
                    "label": _label(section),
                }
            )
        starts = {start for part in self.config.mixture for start, _ in weight_changes(part)}
        changes = [[start, weights_at(self.config, start)] for start in sorted(starts - {0})]
        changing = [json.dumps(changes)] if changes else []
        directory = self.cache / "corpora" / digest_of(FORMAT, json.dumps(parts), *changing)
        with published(directory, self.progress) as folder:
            if folder:
                frequencies = sum(
                    weight * corpus.counts() / corpus.counts().sum()
                    for weight, corpus in zip(weights, corpora, strict=True)
                )
                # The key must not depend on where files are, nor on the parts' labels.
                keys = []
                for part, corpus in zip(parts, corpora, strict=True):
                    if corpus.key != part["corpus"]:
                        part = {**part, "corpus": corpus.key, "label": ""}
                    keys.append(part)
                meta = {
                    "end_of_text": first.end_of_text,
                    "format": FORMAT,
                    "key": digest_of(FORMAT, json.dumps(keys), *changing),
                    "mixture": parts,
                    "unigram_entropy": entropy(np.asarray(frequencies)),
                    "vocab_size": first.vocab_size,
                }
                if changes:
                    meta["changes"] = changes
                copy_tokenizer(first.tokenizer_directory, folder / "tokenizer")
                (folder / "meta.json").write_text(json.dumps(meta, indent=1))
        mixture = Corpus.open(directory, shards=self.shards)
        skipped: Counter[str] = Counter()
        for corpus in corpora:
            skipped.update(corpus.facts.skipped or {})
        facts = Facts(skipped=dict(sorted(skipped.items())), skipped_first=[])
        return replace(mixture, parts=tuple(corpora), facts=facts)

    def _name(self, directory: Path) -> str:
        """Return the name of a corpus in the cache, or the path of a manifest."""
        return directory.name if directory.parent == self.cache / "corpora" else str(directory)

    def _progress_of(self, number: int, num_parts: int) -> Progress:
        """Return the progress of one part, which shows the part's number in a mixture."""
        part = f", part {number + 1} of {num_parts}" if self.config.mixture else ""
        return lambda phase, done, total: self.progress(phase + part, done, total)


@contextmanager
def _prefix_errors(place: str) -> Iterator[None]:
    """Add the place of a part or set before a DataError's message."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{place}: {error}") from error


def _label(part: PartConfig) -> str:
    """Return the name of a part for tables."""
    more = f" and {len(part.paths) - 1} more" if len(part.paths) > 1 else ""
    which = part.paths[0] + more if part.paths else part.name
    return mask(" ".join(filter(None, [part.source, which, part.subset])))


def validation_sets(config: DataConfig) -> dict[str, PartConfig]:
    """Return the validation sets by name, including the data sets' own `validation_split`.

    The latter are named "validation", or "mixture.i.validation" for part i of a mixture.
    """
    sets: dict[str, PartConfig] = dict(config.validation)
    split = config.validation_split
    sources: dict[str, Source] = {"validation": config}
    for number, part in enumerate(config.mixture):
        sources[f"mixture.{number}.validation"] = part
    for name, source in sources.items():
        if split is None or source.source != "hub" or source.split == split or name in sets:
            continue
        if has_split(source.name, source.subset, split):
            keys = {key: getattr(source, key) for key in PartConfig.model_fields if key != "weight"}
            sets[name] = PartConfig(**keys | {"split": split})
    return sets
