"""Each remedy of a config's error is applied as it is written, and the error is gone."""

import json
import re
from collections.abc import Iterator
from copy import deepcopy

import pytest

from parallel3d.base.section import Problem, Problems
from parallel3d.config import RunConfig, settings
from parallel3d.config.foreign_names import OURS
from tests.config.configs import LLAMA, REMOVED, raw
from tests.config.test_config_bad import BAD, BAD_TOGETHER

pytestmark = pytest.mark.pure

PATHS = [re.sub(r"\[\]|\.NAME", ".0", setting.path) for setting in settings()]
BLOCKS = {path.rpartition(".")[0] for path in PATHS}
CASES = [{path: value} for path, value, *_ in BAD] + [changes for changes, *_ in BAD_TOGETHER]
NUMBER = r"-?\d+(?:\.\d+)?"
EXAMPLES = {
    "write a whole number": 7,
    "write a number": 0.5,
    "write a finite number": 0.5,
    "write true or false": False,
    "write a text in double quotes": "text",
}
# What a remedy leaves to the reader, who knows the purpose: a test cannot choose for him.
OPEN = re.compile(
    r"another|raise|lower|shorter|earlier|disable|exactly|use letters|write \[\.\.\.\]|write \{|"
    r"did you mean|the nearest one|see --help|write one of these|run `|"
    r"such as|one of them|add up to|the path of a file|one stage|this block has|"
    r"a hidden_size that is"
)


def problems_of(changes) -> tuple[Problem, ...]:
    try:
        RunConfig.from_dict(raw(**changes))
    except Problems as error:
        return error.problems
    return ()


def path_named(name: str, near: str) -> str | None:
    """The path of the setting that a remedy names, as it is or in the block of the problem."""
    for block in ["", *parents(near), "parallel3d", "parallel3d.run"]:
        path = f"{block}.{name}" if block else name
        if path in PATHS or path in BLOCKS:
            return path
    return next((path for path in PATHS if path.endswith(f".{name}")), None)


def parent_of(path: str, name: str) -> str:
    """The block in which a remedy's `"name": value` stands, with its dot."""
    places = [path.rpartition(".")[0], *parents(path), "parallel3d", ""]
    block = next(p for p in places if (f"{p}.{name}" if p else name) in {*PATHS, *BLOCKS})
    return f"{block}." if block else ""


def parents(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def value_in(text: str) -> object:
    try:
        return json.loads(text.replace("'", '"'))
    except ValueError:
        return text


def edits_of(problem: Problem) -> Iterator[dict[str, object] | None]:
    """Yield the changes of each alternative in a remedy; None for one that is not understood."""
    path = problem.path
    remedy = problem.remedy.replace("use none, selective", "use none, or selective")
    for alternative in re.split(r", or (?=[a-z])|, or (?=\")|; ", remedy):
        words = re.sub(r"^(use|write|set|add) ", "", alternative.removesuffix(" here"))
        words = words.partition(", which")[0].partition(" (")[0]
        words = re.sub(r"^one of:? |^the schedule | heads$| microbatches( or more)?$", "", words)
        example = next((v for key, v in EXAMPLES.items() if alternative.startswith(key)), None)
        if words.startswith(("mlp", "a list of layernorm", "{", "selective")) or not words:
            yield {}
        elif problem.rule == "is another program's name":
            yield {path: REMOVED}
        elif words == "none":
            yield {path: "none"}
        elif (
            alternative.startswith(("remove it", "leave it out"))
            or words == "sequence_parallel = false"
        ):
            yield (
                {path: REMOVED}
                if words != "sequence_parallel = false"
                else {"parallel3d.mesh.sequence_parallel": False}
            )
        elif example is not None:
            yield {path: example}
        elif match := re.fullmatch(r"at (?:most|least) (\d+)(?: stages)?", words):
            yield {path: int(match[1])}
        elif match := re.fullmatch(rf"({NUMBER}) or (?:more|less)(?: for both)?", words):
            yield {path: value_in(match[1])}
        elif match := re.fullmatch(r'"(\w+)": ("[^"]*"|[^,]+|\{.*\})(?: to \w+)?', words):
            yield {f"{parent_of(path, match[1])}{match[1]}": value_in(match[2])}
        elif match := re.fullmatch(r"([\w.]+) = ([^,]+?)(?: or (?:less|more))?(?:, .*)?", words):
            named = path_named(match[1], path)
            first, *_ = re.split(r" or ", match[2])
            yield {named: value_in(first)} if named else None
        elif match := re.fullmatch(r"(stage|type|device|source|count) (\S+).*", words):
            yield {f"{path.rpartition('.')[0]}.{match[1]}": value_in(match[2].rstrip(","))}
        elif re.fullmatch(r"\w[\w-]*(, \w[\w-]*)+", words):
            for one in words.split(", "):
                yield {path: one}
        elif re.fullmatch(rf"(null|\"[^\"]*\"|'[^']*'|{NUMBER})((, | or ).*)?", words):
            first = re.split(r", | or ", words)
            for one in {first[0], first[-1]}:
                yield {path: value_in(one)}
        elif words.split(",")[0] in ("fp32", "true", "false"):
            yield {path: value_in(words.split(",")[0])}
        elif (named := path_named(words.split(",")[0].split(" ")[0], path)) is not None:
            yield {}  # a setting that exists, and whose value is the reader's
        elif OPEN.search(alternative):
            yield {}
        else:
            yield None


def applied(changes, edits):
    """The changes with edits; those inside a changed block are made in it."""
    result = dict(changes)
    for path, value in edits.items():
        inside = next((p for p in result if path.startswith(f"{p}.")), None)
        if path in result or inside is None:
            result[path] = value
            continue
        block = deepcopy(result[inside])
        *sections, key = path.removeprefix(f"{inside}.").split(".")
        target = block
        if isinstance(block, list):
            key = int(key)
        for section in sections:
            target = target.setdefault(section, {})
        if value is REMOVED:
            target.pop(key, None)
        else:
            target[key] = value
        result[inside] = block
    return result


@pytest.mark.parametrize("changes", CASES, ids=range(len(CASES)))
def test_remedy_removes_the_error(changes):
    """Each alternative of the remedy by itself; other errors may come to light."""
    if any("�" in str(v) or not str(v).isprintable() for v in changes.values()):
        return
    for problem in problems_of(changes):
        for edits in edits_of(problem):
            assert edits is not None, f"not understood: {problem}"
            after = problems_of(applied(changes, edits)) if edits else ()
            same = [p for p in after if (p.path, p.rule) == (problem.path, problem.rule)]
            assert not same, f"{edits} changes nothing: {problem}"


# Values that would be wrong in our setting: of another unit, or the opposite.
OTHER_UNITS = {
    "min_lr": "over the peak",
    "train_samples": "over the global batch",
    "lr_warmup_samples": "over the global batch",
    "eval_iters": "times the global batch",
    "distributed_timeout_minutes": "60 times",
    "num_replicas": "dp over this number",
    "untie_embeddings_and_output_weights": "= false",
}


@pytest.mark.parametrize("theirs", OTHER_UNITS)
def test_name_with_another_unit_says_how_to_convert_it(theirs):
    (problem,) = [p for p in problems_of({theirs: 1}) if p.path == theirs]
    assert OTHER_UNITS[theirs] in problem.remedy


@pytest.mark.parametrize(("theirs", "ours"), OURS.items())
def test_names_of_other_programs_lead_to_settings(theirs, ours):
    for name in re.split(r", and ", ours):
        path = name.partition(" = ")[0]
        assert path in PATHS or path in BLOCKS, path
    problems = problems_of({theirs: 1})
    assert [p for p in problems if p.path == theirs and ours in p.remedy], problems


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel3d.mesh": {"pp": 1, "cp": 3, "tp": 1}},
        {"parallel3d.mesh": {"pp": 1, "cp": 3, "tp": 2, "sequence_parallel": True}},
        {
            "parallel3d.mesh": {"pp": 1, "tp": 3, "sequence_parallel": True},
            "parallel3d.model.num_attention_heads": 6,
            "parallel3d.model.hidden_size": 96,
        },
    ],
)
@pytest.mark.parametrize("positions", [128, 1024])
def test_length_that_the_mesh_divides_is_one_that_the_model_has(changes, positions):
    changes = changes | {"parallel3d.model.max_position_embeddings": positions}
    (problem,) = problems_of(changes)
    lengths = re.findall(r"(\d+)(?= or|, or)", problem.remedy)
    assert len(lengths) == (2 if positions > 128 else 1), problem
    for length in lengths:
        assert not problems_of(changes | {"parallel3d.data.sequence_length": int(length)})


def test_key_is_looked_for_in_its_own_block_first():
    """As older configs of transformers write it; "type" is also a key of other blocks."""
    llama = LLAMA | {"max_position_embeddings": 128, "rope_scaling": {"type": "linear"}}
    (problem,) = [p for p in problems_of({"parallel3d.model": llama}) if p.path.endswith(".type")]
    assert problem.remedy == 'did you mean "rope_type"?'
