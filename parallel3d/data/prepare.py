"""Preparation of a corpus or mixture from a config, published in the cache under its content."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.config.data import DataConfig, PartConfig, holds_ids
from parallel3d.data.cache import cache_root, is_whole, locked, staged
from parallel3d.data.corpus import Corpus, entropy
from parallel3d.data.corpus_folder import (
    FORMAT,
    TRAINING_BYTES,
    Recipe,
    contents_of,
    copy_tokenizer,
    digest_of,
    train,
)
from parallel3d.data.documents import Documents, find_documents
from parallel3d.data.mixing import whole_shares
from parallel3d.data.sources import Progress, find_files, silent
from parallel3d.data.split import num_common, split_documents
from parallel3d.data.tokenised import Tokenised, TokenRecipe, find_tokens, vocabulary_of
from parallel3d.data.tokenizer import check_name, save_tokenizer, tokenizer_directory


def prepare(config: DataConfig, progress: Progress = silent) -> Corpus:
    """The corpus or mixture that `config` describes, from the cache if it is there.

    The cache knows a corpus by its documents' contents, its tokenizer and its split, never by
    names or times, nor by the sequence length. Any number of processes may call this at once: one
    works, the others wait. Raises DataError; then nothing half-written is left behind but whole
    shards of tokens, with which the next preparation of the same goes on.

    Validation sets are corpora of their own, with the tokenizer of the first, all held out; `found`
    then says how many of their documents are trained on, too: `num_in_training`; and `found_by`
    names the setting of a set that the config does not list.
    """
    check_name(config.tokenizer)
    cache = cache_root(config.cache)
    make = _prepare_mixture if config.source == "mixture" else _prepare_one
    corpus, training = make(config, cache, progress)
    sets = {}
    for name, section in validation_sets(config).items():
        asked = name in config.validation
        try:
            prepared = _prepare_set(section, config, corpus, training, cache, progress)
        except DataError as error:
            if asked:
                raise DataError(f"data.validation.{name}: {error}") from error
            raise DataError(
                f"data.validation_split: {name}: {error}; or set data.validation_split to null"
            ) from error
        found = prepared.found if asked else {**prepared.found, "found_by": "data.validation_split"}
        sets[name] = replace(prepared, found=found)
    return replace(corpus, validation=sets)


def _prepare_one(config: DataConfig, cache: Path, progress: Progress) -> tuple[Corpus, np.ndarray]:
    """Prepare a corpus that is no mixture; give the digests of its training documents, too."""
    documents = _find(config, config, cache, progress)
    [held_out] = split_documents([documents.table], config.held_out_fraction, config.held_out_seed)
    with _given_tokenizer(config) as tokenizer:
        recipe = _recipe(documents, held_out, tokenizer, config.vocab_size)
        corpus = _cached(cache, recipe, config.workers, progress)
    return _with_skips(corpus, documents), documents.table["digest"][~held_out]


def _prepare_set(
    section: PartConfig,
    config: DataConfig,
    corpus: Corpus,
    training: np.ndarray,
    cache: Path,
    progress: Progress,
) -> Corpus:
    found = _find(section, config, cache, progress)
    everything = np.ones(len(found), dtype=bool)
    with _given_tokenizer(config) as given:
        own = corpus.tokenizer_directory if config.tokenizer == "train" else None
        recipe = _recipe(found, everything, given or own, 0)
        prepared = _with_skips(_cached(cache, recipe, config.workers, progress), found)
    common = num_common(found.table["digest"], training)
    return replace(prepared, found={**prepared.found, "num_in_training": common})


def _prepare_mixture(
    config: DataConfig, cache: Path, progress: Progress
) -> tuple[Corpus, np.ndarray]:
    """Prepare each part as a corpus of its own, all with one tokenizer."""
    parts = config.mixture
    shown = [_of_part(progress, i, len(parts)) for i in range(len(parts))]
    documents = []
    for number, part in enumerate(parts):
        try:
            documents.append(_find(part, config, cache, shown[number]))
        except DataError as error:
            raise DataError(f"data.mixture.{number}: {error}") from error
    tables = [part.table for part in documents]
    held_out = split_documents(tables, config.held_out_fraction, config.held_out_seed)
    shares = whole_shares([part.weight for part in parts])
    with _given_tokenizer(config) as given:
        tokenizer = given
        if config.tokenizer == "train":
            text = [part for part in documents if isinstance(part, Documents)]
            tokenizer = _cached_tokenizer(
                cache, text, held_out, shares, config.vocab_size, progress
            )
        corpora = [
            _cached(
                cache, _recipe(documents[i], held_out[i], tokenizer, 0), config.workers, shown[i]
            )
            for i in range(len(parts))
        ]
    labels = [_label(part) for part in parts]
    mixture = _cached_mixture(cache, corpora, labels, shares, progress)
    parts_found = tuple(map(_with_skips, mixture.parts, documents))
    skipped: Counter[str] = Counter()
    for prepared in parts_found:
        skipped.update(prepared.found.get("skipped", {}))
    found = {**mixture.found, "skipped": dict(sorted(skipped.items())), "skipped_first": []}
    mixture = replace(mixture, parts=parts_found, found=found)
    training = [table["digest"][~apart] for table, apart in zip(tables, held_out, strict=True)]
    return mixture, np.concatenate(training)


def _find(
    section: DataConfig | PartConfig, config: DataConfig, cache: Path, progress: Progress
) -> Documents | Tokenised:
    """Find the documents of a source that is no mixture, of text or of token ids."""
    if not holds_ids(section):
        rule = (config.on_error, config.max_skipped)
        return find_documents(find_files(section, config.max_line_bytes), cache, progress, rule)
    with _given_tokenizer(config) as tokenizer:
        return find_tokens(section, vocabulary_of(config, tokenizer), cache, progress)


def _with_skips(corpus: Corpus, documents: Documents | Tokenised) -> Corpus:
    """The corpus with what was left out of its source this time, beside what was found."""
    if isinstance(documents, Tokenised):
        return corpus
    return replace(corpus, found={**corpus.found, **documents.skips.summary()})


def _recipe(
    found: Documents | Tokenised, held_out: np.ndarray, tokenizer: Path | None, vocab_size: int
) -> Recipe | TokenRecipe:
    if isinstance(found, Tokenised):
        return TokenRecipe(found, held_out, tokenizer)
    return Recipe(found, held_out, tokenizer, vocab_size)


def _cached(
    cache: Path, recipe: Recipe | TokenRecipe, workers: int | str, progress: Progress
) -> Corpus:
    directory = cache / "corpora" / recipe.key()
    unfinished = cache / "unfinished" / directory.name
    with _published(directory, progress) as folder:
        if folder:
            recipe.fill(folder, unfinished, workers, progress)
    if folder:
        # Only now: until the corpus is whole, its shards are all there is.
        shutil.rmtree(unfinished, ignore_errors=True)
        with suppress(OSError):
            unfinished.parent.rmdir()
    return Corpus.open(directory)


def _cached_tokenizer(
    cache: Path,
    documents: Sequence[Documents],
    held_out: Sequence[np.ndarray],
    shares: Sequence[int],
    vocab_size: int,
    progress: Progress,
) -> Path:
    """The tokenizer of a mixture, trained on as much of each part as its share says."""
    key: list[object] = [FORMAT, vocab_size, *shares]
    for part, apart in zip(documents, held_out, strict=True):
        key += contents_of(part.table, apart)
    directory = cache / "tokenizers" / digest_of(*key)
    with _published(directory, progress) as folder:
        if folder:
            budgets = [TRAINING_BYTES * share / sum(shares) for share in shares]
            sources = list(zip(documents, held_out, budgets, strict=True))
            save_tokenizer(train(sources, vocab_size, progress), folder)
    return directory


def _cached_mixture(
    cache: Path,
    corpora: Sequence[Corpus],
    labels: Sequence[str],
    shares: Sequence[int],
    progress: Progress,
) -> Corpus:
    weights = [share / sum(shares) for share in shares]
    parts = [
        {"corpus": corpus.directory.name, "weight": weight, "label": label}
        for corpus, weight, label in zip(corpora, weights, labels, strict=True)
    ]
    directory = cache / "corpora" / digest_of(FORMAT, json.dumps(parts))
    with _published(directory, progress) as folder:
        if folder:
            frequencies = sum(
                weight * corpus.counts() / corpus.counts().sum()
                for weight, corpus in zip(weights, corpora, strict=True)
            )
            # The names of files that lie elsewhere do not count, nor do those of the parts.
            keys = [
                part
                if corpus.key == part["corpus"]
                else {**part, "corpus": corpus.key, "label": ""}
                for part, corpus in zip(parts, corpora, strict=True)
            ]
            meta = {
                "end_of_text": corpora[0].end_of_text,
                "format": FORMAT,
                "key": digest_of(FORMAT, json.dumps(keys)),
                "mixture": parts,
                "unigram_entropy": entropy(np.asarray(frequencies)),
                "vocab_size": corpora[0].vocab_size,
            }
            copy_tokenizer(corpora[0].tokenizer_directory, folder / "tokenizer")
            (folder / "meta.json").write_text(json.dumps(meta, indent=1))
    return Corpus.open(directory)


@contextmanager
def _published(directory: Path, progress: Progress) -> Iterator[Path | None]:
    """A folder that becomes `directory`, or None if that is whole already.

    Raises DataError if the cache cannot be written.
    """

    def say_waiting() -> None:
        progress("waiting for another process that prepares this corpus", 0, 1)

    if is_whole(directory):
        yield None
        return
    try:
        with locked(directory, say_waiting):
            # Whoever held the lock before may have written it.
            if is_whole(directory):
                yield None
            else:
                with staged(directory) as folder:
                    yield folder
    except OSError as error:
        raise DataError(
            f"the cache {directory.parent} cannot be written ({error.strerror or error});"
            " set data.cache to a directory that is writable and has room"
        ) from error


def _given_tokenizer(config: DataConfig) -> AbstractContextManager[Path | None]:
    """The directory of the tokenizer that is named; None where one is trained, or none is."""
    given = config.tokenizer not in ("train", "none")
    return tokenizer_directory(config.tokenizer) if given else nullcontext()


def _of_part(progress: Progress, number: int, num_parts: int) -> Progress:
    """Show the progress of one part of a mixture."""
    return lambda phase, done, total: progress(
        f"{phase}, part {number + 1} of {num_parts}", done, total
    )


def _label(part: PartConfig) -> str:
    """What a part is called where parts are listed."""
    more = f" and {len(part.paths) - 1} more" if len(part.paths) > 1 else ""
    which = part.paths[0] + more if part.paths else part.name
    return " ".join(filter(None, [part.source, which, part.subset]))


def validation_sets(config: DataConfig) -> dict[str, PartConfig]:
    """The validation sets by name; a data set's `validation_split` is one of them.

    Its name is "validation", of part i of a mixture "mixture.i.validation".
    """
    sets: dict[str, PartConfig] = dict(config.validation)
    split = config.validation_split
    found: dict[str, PartConfig | DataConfig] = {"validation": config}
    for number, part in enumerate(config.mixture):
        found[f"mixture.{number}.validation"] = part
    for name, source in found.items():
        if split is None or source.source != "hub" or source.split == split or name in sets:
            continue
        # Takes a second to import.
        from parallel3d.data.hub import has_split

        if has_split(source.name, source.subset, split):
            keys = {key: getattr(source, key) for key in PartConfig.model_fields if key != "weight"}
            sets[name] = PartConfig(**keys | {"split": split})
    return sets
