"""Conversations, and tokenizers whose chat templates mark the assistant's turns or do not."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel3d.config.data import DataConfig
from parallel3d.data.tokenizer import train_tokenizer

# As ChatML, with tools and tool calls. The sign ~ stands for a newline that Jinja keeps.
MARKED = (
    "{% if tools %}<|start|>tools{{ tools | tojson }}<|end|>{{ '\\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'bad' %}{{ raise_exception('no role bad, please') }}{% endif %}"
    "<|start|>{{ m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}"
    "<|end|>{{ '\\n' }}{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{{ '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{{ 'assistant\\n' }}{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# It shows the last turn in another way than the earlier ones, as templates of reasoners do.
REWRITING = (
    "{% for m in messages %}<|start|>{{ m.role }}:{% if loop.last %}<think>{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)


def save_tokenizer_with(template: str | None, folder: Path, end: str = "<|end|>") -> Path:
    """Write a tokenizer with a chat template; `end` is its end-of-text."""
    tokenizer = train_tokenizer(["user assistant hello there, what is it?"] * 3, 290)
    special = {"eos_token": end, "extra_special_tokens": ["<|start|>", "<|end|>"]}
    tokenizer.add_special_tokens(special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def turns(*contents: str) -> dict[str, Any]:
    """Return a conversation whose turns are the user's and the assistant's, in turn."""
    roles = ("user", "assistant")
    messages = []
    for number, content in enumerate(contents):
        messages.append({"role": roles[number % 2], "content": content})
    return {"messages": messages}


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add two numbers."}}
WITH_TOOLS = {
    "tools": [TOOL],
    "messages": [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "1 and 2?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ],
}
CONVERSATIONS = [
    WITH_TOOLS,
    turns("hello", "hello there", "ünïcödé 你好?", "\U0001f600 yes\n\n  indented "),
    *(turns(f"what is {n}?", f"{n}, or {n + 1}", "why?", f"so: {n * n}") for n in range(12)),
]


def write_lines(path: Path, conversations: Sequence[object]) -> Path:
    """Write one conversation a line."""
    path.write_text("".join(json.dumps(one) + "\n" for one in conversations))
    return path


def config_of(path: Path, tokenizer: Path, **changes: Any) -> DataConfig:
    """Return the settings of a corpus of conversations."""
    settings = {"held_out_fraction": 0, "sequence_length": 256, **changes}
    settings |= {"paths": (str(path),), "cache": str(path.parent / "cache")}
    return DataConfig(source="chat", tokenizer=str(tokenizer), **settings)
