"""Conversations as token ids, rendered by the tokenizer's chat template.

A file is rendered once, into a folder of the cache:

    chat.arrow    a row for each usable conversation: `input_ids`, which end with an end-of-text;
                  `weights`, 1 for the assistant's tokens and 0 for all others; `row`, its line
    skips.json    the conversations that were left out

From there the ids are read as those of other programs are (`tokenised`).
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.base.errors import DataError, first_line
from parallel3d.config.data import DataConfig
from parallel3d.data.cache import digest_of, file_digest, published
from parallel3d.data.corpus import CHAT
from parallel3d.data.documents import LISTED, MEGABYTE, Skips
from parallel3d.data.ids import arrow
from parallel3d.data.ids.id_file import NUMBERS, TokenFile
from parallel3d.data.ids.validate import Checked, OnIds, Vocabulary, check
from parallel3d.data.lines import (
    EMPTY,
    ENDS_WITH_USER,
    NO_FIELD,
    PARQUET,
    TOO_LONG,
    TOO_MANY_TOKENS,
    UNTRAINED,
    Flaw,
    Lines,
    first_bytes,
    json_object,
)
from parallel3d.data.rows import ROWS_PER_BATCH, failures, place_of, unreadable
from parallel3d.data.sources import SUFFIX, OnCount, Progress, matching_files
from parallel3d.data.tokenised import Tokenised, index_files
from parallel3d.data.tokenizer import directory_digest, load_tokenizer, num_tokens

# Part of a rendered file's name; raise it when the same conversation yields other bytes.
FORMAT = 1
ASSISTANT = "assistant"
EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, ...]}'
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
Messages = list[dict[str, Any]]


class Template:
    """The chat template of the tokenizer in `directory`; raise DataError if it has none.

    `name` is the tokenizer's, for messages.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._tokenizer: Any = load_tokenizer(directory)
        # A conversation that is too long is counted here, without a warning for each.
        self._tokenizer.model_max_length = 10**12
        self.vocabulary = Vocabulary(
            num_tokens(self._tokenizer), self._tokenizer.eos_token_id, is_sure=True
        )
        if not self._tokenizer.chat_template:
            raise DataError(
                f'data.tokenizer = {name!r}: has no chat template, which source "chat" needs; use a'
                " folder with the tokenizer and a chat_template.jinja"
            )
        if not self._tokenizer.is_fast:
            raise DataError(
                f"data.tokenizer = {name!r}: does not say which characters a token stands for, so"
                " the assistant's tokens are unknown; use one with a tokenizer.json"
            )

    def render(
        self, messages: Messages, tools: list[Any] | None, place: str
    ) -> tuple[list[int], list[int]]:
        """Return a conversation's ids, and for each 1 if it is the assistant's, else 0.

        With generation marks in the template both are those of transformers' apply_chat_template.
        Raises Flaw, which names `place`, if the template cannot render it.
        """
        try:
            if not _MARKS.search(self._tokenizer.get_chat_template(None, tools)):
                return self._render_by_prefix(messages, tools)
            encoded = self._tokenizer.apply_chat_template(
                messages, tools, return_dict=True, return_assistant_tokens_mask=True
            )
            return encoded["input_ids"], encoded["assistant_masks"]
        # Broad: a template is a program, and may fail in any way.
        except Exception as error:
            raise Flaw(
                "refused by the chat template",
                f"{place}: the chat template fails ({first_line(error)}); mend the conversation or"
                " the template",
            ) from None

    def _render_by_prefix(
        self, messages: Messages, tools: list[Any] | None
    ) -> tuple[list[int], list[int]]:
        """Return what `render` does, with a template that does not mark the assistant's turns."""
        text = self._text(messages, tools)
        spans = list(self._spans(text, messages, tools))
        encoded = self._tokenizer(text, add_special_tokens=False)
        mask = []
        for first, end in encoded.encodings[0].offsets:
            is_own = any(first < last and end > start for start, last in spans)
            mask.append(int(is_own))
        return encoded["input_ids"], mask

    def _text(self, messages: Messages, tools: list[Any] | None, prompt: bool = False) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, tools, tokenize=False, add_generation_prompt=prompt
        )
        return str(text)

    def _spans(
        self, text: str, messages: Messages, tools: list[Any] | None
    ) -> Iterator[tuple[int, int]]:
        """Yield the characters of each of the assistant's turns, [first, end).

        A turn begins where the text before it ends with the generation prompt, and ends where the
        next one begins.
        """
        for number, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                before = self._text(messages[:number], tools, prompt=True)
                after = self._text(messages[: number + 1], tools)
                if not (after.startswith(before) and text.startswith(after)):
                    raise ValueError(
                        f"it writes the turns before message {number + 1} in another way once more"
                        " follow, so the assistant's tokens are unknown; put {% generation %} and"
                        " {% endgeneration %} around them"
                    )
                yield len(before), len(after)


def find_chat(
    config: DataConfig, paths: Sequence[str], tokenizer: Path, cache: Path, progress: Progress
) -> Tokenised:
    """Return the conversations in `paths`, each as a document.

    Raises DataError for unusable conversations, unless `data.on_error` is "skip" and they are few
    enough, and if none is left.
    """
    template = Template(tokenizer, config.tokenizer)
    identity = (directory_digest(tokenizer), config.sequence_length, config.max_line_bytes)
    files: list[TokenFile] = []
    digests: list[str] = []
    rows: list[np.ndarray] = []
    skips = Skips()
    num_lost = 0
    sources = matching_files(paths, SUFFIX["chat"])
    for path in sources:
        try:
            directory = cache / "chats" / digest_of(FORMAT, path, _digest(path), *identity)
            with published(directory, progress) as folder:
                if folder:
                    _render_file(path, template, folder, config, progress)
        except Flaw as flaw:
            skips.add(path, flaw)
            num_lost += 1
            continue
        own_skips, has_rows = _read_skips(directory)
        skips.add_all(own_skips)
        if has_rows:
            name = str(directory / "chat.arrow")
            files.append(arrow.read(name, path, "input_ids"))
            digests.append(file_digest(directory / "chat.arrow"))
            rows.append(_column(name, "row"))
    _refuse(skips, config, sum(map(len, rows)))
    skips.check_share(num_lost, len(sources) - num_lost, config.max_skipped, "files")
    skips.check_share(skips.num_flawed, sum(map(len, rows)), config.max_skipped)
    if not files:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in skips.counts.items())
        raise DataError(
            f"{sources[0]}: no conversation is left to train on ({reasons or 'the file is empty'});"
            f" write lines such as {EXAMPLE}, which end with the assistant and are not longer than"
            f" data.sequence_length = {config.sequence_length}"
        )
    weights = [arrow.read(file.path, file.name, "weights", kinds=NUMBERS) for file in files]

    def check_file(file: TokenFile, on_ids: OnIds) -> Checked:
        return check(file, template.vocabulary, sample=False, on_ids=on_ids)

    tokens = index_files(files, weights, template.vocabulary, check_file, progress)
    for number, own_rows in enumerate(rows):
        here = tokens.table["file"] == number
        tokens.table["row"][here] = own_rows[tokens.table["row"][here] - 1]
    facts = replace(tokens.facts, weights=f"{CHAT} {digest_of(*digests)}")
    return replace(tokens, facts=facts, skips=skips)


def _digest(path: str) -> str:
    """Return a digest of a file's content; raise Flaw if it cannot be read."""
    try:
        return file_digest(Path(path))
    except OSError as error:
        raise unreadable(path, error) from error


def _refuse(skips: Skips, config: DataConfig, usable: int) -> None:
    """Raise DataError if conversations are unusable and none may be."""
    if config.on_error == "stop" and skips.num_flawed:
        raise skips.stop("conversations", usable, config.max_skipped)


def _render_file(
    path: str, template: Template, folder: Path, config: DataConfig, progress: Progress
) -> None:
    """Write the conversations of a file to `folder`; raise DataError if some are unusable."""
    import pyarrow as pa

    schema = pa.schema(
        {"input_ids": pa.list_(pa.uint32()), "weights": pa.list_(pa.uint8()), "row": pa.int64()}
    )
    skips = Skips()
    total = max(1, os.path.getsize(path) // MEGABYTE)
    num_rows = 0
    ready: list[dict[str, Any]] = []

    def on_bytes(count: int) -> None:
        progress("rendering conversations (MB)", min(count // MEGABYTE, total), total)

    with (
        pa.OSFile(str(folder / "chat.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as stream,
    ):

        def write() -> None:
            nonlocal num_rows
            if ready:
                stream.write_batch(pa.RecordBatch.from_pylist(ready, schema))
            num_rows += len(ready)
            ready.clear()

        for row, value in _values(path, config.max_line_bytes, on_bytes):
            place = place_of("jsonl" if isinstance(value, bytes) else "parquet", path, row)
            try:
                ids, weights = _sample(value, place, template, config)
                ready.append({"input_ids": ids, "weights": weights, "row": row})
            except Flaw as flaw:
                flaw.row = row
                skips.add(path, flaw)
            if config.on_error == "stop" and len(skips.listed) == LISTED:
                break
            if len(ready) == ROWS_PER_BATCH:
                write()
        write()
    _refuse(skips, config, num_rows)
    content = {"counts": skips.counts, "listed": skips.listed, "num_rows": num_rows}
    (folder / "skips.json").write_text(json.dumps(content))


def _read_skips(directory: Path) -> tuple[Skips, bool]:
    """Return what was left out of a rendered file, and True if something is left."""
    content = json.loads((directory / "skips.json").read_text())
    return Skips(Counter(content["counts"]), content["listed"]), content["num_rows"] > 0


def _column(path: str, name: str) -> np.ndarray:
    """Return a column of numbers of an Arrow stream file."""
    import pyarrow as pa

    with pa.memory_map(path) as source, pa.ipc.open_stream(source) as stream:
        column: np.ndarray = stream.read_all()[name].to_numpy()
    return column


def _values(
    path: str, max_line_bytes: int, on_bytes: OnCount
) -> Iterator[tuple[int, bytes | Mapping[str, Any]]]:
    """Yield number and content of each line of JSON or row of Parquet, by the file's first bytes.

    Raises Flaw if the file cannot be read, or has no column of messages.
    """
    try:
        if first_bytes(path).startswith(PARQUET):
            yield from _parquet_rows(path)
            return
        # The line ending, and one byte more, which shows that the line is too long.
        lines = Lines(path, max_line_bytes + 3)
        while line := lines.read():
            yield lines.row, line
            on_bytes(lines.position)
    except failures() as error:
        raise unreadable(path, error) from error


def _parquet_rows(path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, memory_map=True) as file:
        names = file.schema_arrow.names
        if "messages" not in names:
            quoted = ", ".join(f'"{name}"' for name in names[:8])
            raise Flaw(
                NO_FIELD,
                f'{path} has no column "messages"; it has {quoted}; give the column of the'
                " conversations this name",
                file.metadata.num_rows,
            )
        row = 0
        columns = [name for name in ("messages", "tools") if name in names]
        for batch in file.iter_batches(ROWS_PER_BATCH, columns=columns):
            for value in batch.to_pylist():
                row += 1
                yield row, value


def _sample(
    value: bytes | Mapping[str, Any], place: str, template: Template, config: DataConfig
) -> tuple[list[int], list[int]]:
    """Return ids and weights of a conversation, with an end-of-text; raise Flaw if it is unfit."""
    if isinstance(value, bytes):
        if len(value.rstrip(b"\r\n")) > config.max_line_bytes:
            raise Flaw(
                TOO_LONG,
                f"{place} has more than {config.max_line_bytes:,} bytes; raise data.max_line_bytes",
            )
        if not value.strip():
            raise Flaw(EMPTY, f"{place} is empty")
        value = json_object(value.removeprefix(b"\xef\xbb\xbf"), place, EXAMPLE)
    messages, tools = _checked(value, place)
    ids, weights = template.render(messages, tools, place)
    end = template.vocabulary.end_of_text
    if ids[-1:] != [end]:
        ids = [*ids, end]
        weights = [*weights, 0]
    if not any(weights):
        raise Flaw(UNTRAINED, f"{place} has no token of the assistant")
    if len(ids) > config.sequence_length:
        raise Flaw(TOO_MANY_TOKENS, f"{place} has {len(ids):,} tokens")
    return ids, weights


def _checked(value: Mapping[str, Any], place: str) -> tuple[Messages, list[Any] | None]:
    """Return the messages and tools of a line; raise Flaw if they are no conversation."""
    if "messages" not in value:
        raise Flaw(NO_FIELD, f'{place} has no field "messages"; write {EXAMPLE}')
    messages = value["messages"]
    if messages is None or messages == []:
        raise Flaw(EMPTY, f"{place} has no messages")
    tools = value.get("tools") or None
    problem = _problem(messages)
    if problem is None and not isinstance(tools, list | None):
        problem = "tools must be a list"
    if problem is not None:
        raise Flaw("not a conversation", f"{place}: {problem}; write {EXAMPLE}")
    if messages[-1]["role"] != ASSISTANT:
        raise Flaw(ENDS_WITH_USER, f"{place} ends without the assistant")
    return messages, tools


def _problem(messages: object) -> str | None:
    """Return what keeps a value from being the messages of a conversation, if anything does."""
    if not isinstance(messages, list):
        return "messages must be a list"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {number} must be an object with a role"
        content = message.get("content")
        if not isinstance(content, str | list | None):
            return f"the content of message {number} must be text"
        if content is None and not message.get("tool_calls"):
            return f"message {number} has no content"
    return None
