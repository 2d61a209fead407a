"""Wrong settings of data with what their messages say, and words for tables of wrong settings."""

from tests.config.configs import LLAMA

P3D = "parallel3d"
BATCH = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
FALLBACKS = f"{P3D}.mesh.fallbacks"
SHARDS = f"{P3D}.mesh.dp_shards"
NOISE = f"{P3D}.train.noise_scale_every"
RECOMPUTE = f"{P3D}.train.check_bits.recompute_every"
SCHEDULE = f"{P3D}.train.batch_schedule"
ROPE = f"{P3D}.model.rope_scaling"
KIND = "parallel3d.model.parametrization"
TEXT = {"source": "text", "paths": ["a.txt"]}
URL = {"source": "jsonl", "paths": ["s3://b/a.jsonl"]}
STREAM = {"stream": True, "manifest": "FOLDER", "tokenizer": "gpt2"}
IDS = {"source": "megatron", "paths": ["a"]}
NO_TOKENIZER = {"tokenizer": "none", "vocab_size": 300, "end_of_text_id": 9}
COLUMNS = {"source": "parquet", "paths": ["a"], "tokenizer": "gpt2"}
MOE = {"family": "moe", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


def data(*blocks: dict[str, object]) -> dict[str, object]:
    """Return the changes that make the data section of these blocks."""
    block: dict[str, object] = {"sequence_length": 128}
    for more in blocks:
        block |= more
    return {f"{P3D}.data": block}


def model(**settings: object) -> dict[str, object]:
    """Return the changes that make a model with experts."""
    return {f"{P3D}.model": MOE | settings}


def llama(**settings: object) -> dict[str, object]:
    return {f"{P3D}.model": LLAMA | settings}


def without(block: dict[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in block.items() if name not in names}


MIXED = {"source": "mixture", "mixture": [TEXT | {"weight": 1}]}

ROWS_OF_DATA = [
    # Data
    (
        data(IDS),
        "name the tokenizer that made them, or",
        [data(IDS, {"tokenizer": "gpt2"}), data(IDS, NO_TOKENIZER)],
    ),
    (
        data({"source": "chat", "paths": ["a"]}),
        "name a folder or a tokenizer of the hub",
        [data({"source": "chat", "paths": ["a"], "tokenizer": "own"})],
    ),
    (
        data(TEXT, without(NO_TOKENIZER, "end_of_text_id")),
        'name a tokenizer, or use "train"',
        [data(TEXT, {"tokenizer": "gpt2"}), data(TEXT, {"tokenizer": "train"})],
    ),
    (
        data(IDS, {"tokenizer": "none"}),
        'write the "vocab_size" and "end_of_text_id" of the ids',
        [data(IDS, NO_TOKENIZER)],
    ),
    (
        data(IDS, NO_TOKENIZER, {"end_of_text_id": 300}),
        "use a smaller id, or raise vocab_size",
        [
            data(IDS, NO_TOKENIZER, {"end_of_text_id": 299}),
            data(IDS, NO_TOKENIZER, {"end_of_text_id": 300, "vocab_size": 301}),
        ],
    ),
    (data(TEXT, {"end_of_text_id": 9}), "remove it: the tokenizer defines its own", [data(TEXT)]),
    (
        data({"source": "mixture"}),
        'add "mixture": [{"source": "text", "paths": ["a/*.txt"], "wei',
        [
            data(
                {
                    "source": "mixture",
                    "mixture": [{"source": "text", "paths": ["a/*.txt"], "weight": 1}],
                }
            )
        ],
    ),
    (
        data({"source": "mixture", "mixture": [{}]}),
        'add it: As data.source, such as "text"',
        [data({"source": "mixture", "mixture": [{"source": "text"} | TEXT]})],
    ),
    (
        data({"source": "mixture", "mixture": [TEXT | {"weight": 0.0}]}),
        "raise it, or write [...]",
        [
            data({"source": "mixture", "mixture": [TEXT | {"weight": 0.1}]}),
            data({"source": "mixture", "mixture": [TEXT | {"weight": [[0, 1.0], [50, 2.0]]}]}),
        ],
    ),
    (
        data({"source": "mixture", "mixture": [TEXT | {"weight": [[5, 1.0]]}]}),
        "begin with [0, WE",
        [data({"source": "mixture", "mixture": [TEXT | {"weight": [[0, 1.0], [5, 2.0]]}]})],
    ),
    (
        data(MIXED, {"validation": {"web": {"source": "text"}}}),
        'add "paths": ["corpus/*.txt"]',
        [data(MIXED, {"validation": {"web": {"source": "text", "paths": ["corpus/*.txt"]}}})],
    ),
    (
        data(MIXED, {"validation": {"a": TEXT | {"weight": 2.0}}}),
        "write 1",
        [data(MIXED, {"validation": {"a": TEXT | {"weight": 1}}})],
    ),
    (
        data(URL),
        'add "stream": true and "manifest", or copy the files to a disk',
        [data(URL, STREAM), data(URL, {"paths": ["a.jsonl"]})],
    ),
    (data(URL, without(STREAM, "manifest")), 'add "manifest": "FOLDER"', [data(URL, STREAM)]),
    (
        data(TEXT, {"manifest": "m"}),
        'remove it, or add "stream": true',
        [data(TEXT), data(TEXT, STREAM, {"manifest": "m"})],
    ),
    (
        data(TEXT, {"count": "as-read"}),
        'remove it, or add "stream": true and "manifest"',
        [data(TEXT), data(TEXT, STREAM, {"count": "as-read"})],
    ),
    (data(IDS, STREAM, {"count": "as-read"}), "remove it", [data(IDS, STREAM)]),
    (
        data(COLUMNS, {"label_field": "x"}),
        'add "token_field": "input_ids"',
        [data(COLUMNS, {"label_field": "x", "token_field": "input_ids"})],
    ),
    (
        data(COLUMNS, {"token_field": "t", "label_field": "x", "weight_field": "y"}),
        "of the two",
        [
            data(COLUMNS, {"token_field": "t", "label_field": "x"}),
            data(COLUMNS, {"token_field": "t", "weight_field": "x"}),
        ],
    ),
    (
        data(COLUMNS, STREAM, {"token_field": "t", "label_field": "x"}),
        "remove it, or remove stre",
        [
            data(COLUMNS, STREAM, {"token_field": "t"}),
            data(COLUMNS, {"token_field": "t", "label_field": "x"}),
        ],
    ),
    (
        data(TEXT, STREAM, {"validation": {"a": TEXT | without(STREAM, "tokenizer")}}),
        "remove it",
        [data(TEXT, STREAM, {"validation": {"a": TEXT}})],
    ),
    (
        data(TEXT, STREAM, {"held_out_fraction": 0.1}),
        "remove it, and use data.validation",
        [data(TEXT, STREAM, {"validation": {"a": TEXT}})],
    ),
    (
        data(TEXT, STREAM, {"packing": "best_fit"}),
        'use "none", or remove stream',
        [data(TEXT, STREAM, {"packing": "none"}), data(TEXT, {"packing": "best_fit"})],
    ),
    (
        data(TEXT, STREAM, {"tokenizer": "train"}),
        "name a folder, or a tokenizer of the hub",
        [data(TEXT, STREAM, {"tokenizer": "folder"})],
    ),
    (
        data(TEXT, STREAM, {"isolate_documents": True, "balance_microbatches": True}),
        "of the two",
        [
            data(TEXT, STREAM, {"isolate_documents": True}),
            data(TEXT, {"isolate_documents": True, "balance_microbatches": True}),
        ],
    ),
    (
        data(TEXT, NO_TOKENIZER, {"fim": {}}),
        "name another",
        [data(TEXT, {"tokenizer": "gpt2", "fim": {}})],
    ),
    (
        data(TEXT, {"fim": {}, "sequence_length": 7}),
        "use 8 or more",
        [data(TEXT, {"fim": {}, "sequence_length": 8})],
    ),
    (
        data(TEXT, STREAM, {"count": "as-read", "fim": {}}),
        'use count "manifest"',
        [data(TEXT, STREAM, {"count": "manifest", "fim": {}})],
    ),
    (
        data({"source": "chat", "paths": ["a"], "tokenizer": "own", "fim": {}}),
        "remove one",
        [
            data({"source": "chat", "paths": ["a"], "tokenizer": "own"}),
            data({"source": "jsonl", "paths": ["a"], "tokenizer": "own", "fim": {}}),
        ],
    ),
]
"""What is wrong, the remedy that its message has, and the changes that are the remedy."""
