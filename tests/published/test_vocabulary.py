"""What the words of a table mean, in the spellings that people use."""

import pytest

from benchmarks.published import programs, vocabulary
from benchmarks.published.cells import UnusableRow, number_in

pytestmark = pytest.mark.pure


def test_every_program_is_found_by_its_own_name_in_any_spelling() -> None:
    for name in programs.names().strip('"').split('", "'):
        for text in (name, name.upper(), name.replace(" ", "_").replace("-", "")):
            program = programs.named(text)
            assert program is not None and program.name == name
    for text, program in (
        ("torchtitan (FSDP2)", programs.FSDP2),
        ("NeMo 24.07", programs.NEMO),
        ("Megatron Core r0.8", programs.MEGATRON_CORE),
        ("Megatron-LM", None),  # the one of 2021, or on Megatron-Core?
        ("DeepSpeed ZeRO-3", None),
    ):
        assert programs.named(text) is program
    assert programs.names("Megatron-LM").startswith('"Megatron-LM 2021", "Megatron-LM 2022"')


def test_16_bits_in_words_mean_the_format_of_the_chip() -> None:
    for text in ("mixed (16-bit)", "16 bits", "half precision"):
        assert vocabulary.precision_of(text, "fp16") == "fp16"
        assert vocabulary.precision_of(text, "bf16") == "bf16"
    with pytest.raises(UnusableRow, match="narrower weights are not modelled"):
        vocabulary.precision_of("4-bit mixed", "bf16")


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("bf16/fp8", "fp8"),
        ("fp16 weights, fp32 Adam state", "fp16"),
        ("BFloat16", "bf16"),
        ("bf16, fp32 reductions", "bf16"),
        ("float8 rowwise", "fp8"),
        ("bf16-mixed", "bf16"),
    ],
)
def test_narrowest_of_several_formats_is_that_of_the_products(text: str, precision: str) -> None:
    assert vocabulary.precision_of(text) == precision


@pytest.mark.parametrize(
    ("text", "stage"), [("2 (FSDP SHARD_GRAD_OP)", 2), ("ZeRO-1", 1), ("3.0", 3), ("DDP", 0)]
)
def test_zero_stages_in_words(text: str, stage: int) -> None:
    assert vocabulary.zero_stage_of(text) == stage


@pytest.mark.parametrize(
    ("text", "attention", "hopper"),
    [
        ("FlashAttention-2", "flash", False),
        ("flash_attn v3", "flash", True),
        ("cuDNN (TE 1.9)", "flash", True),
        ("Flash", "flash", True),
        ("eager", "classic", True),
        ("FlashAttention-2 via SDPA", "flash", False),
        ("fused kernel", "flash", True),
    ],
)
def test_attention_kernels_in_words(text: str, attention: str, hopper: bool) -> None:
    cells = {"program": "NeMo", "kernels": "", "attention_kernel": text}
    program = vocabulary.with_kernels(programs.NEMO, cells)
    assert (program.attention, program.hopper, program.name) == (attention, hopper, "NeMo")


@pytest.mark.parametrize(
    ("program", "kernels", "expected"),
    [
        ("", "eager PyTorch", "eager"),
        ("", "torch.compile", "compiled"),
        ("", "not compiled", "eager"),
        ("", "fused (Apex)", "tuned"),
        ("", "XLA", "compiled"),
        ("torchtitan (torch.compile)", "", "compiled"),
        ("torchtitan, no compile", "", "eager"),
        ("nanotron", "", "eager"),
        ("torchtitan (torch.compile)", "eager", "eager"),
    ],
)
def test_class_of_a_program_is_read_from_the_row(program: str, kernels: str, expected: str) -> None:
    cells = {"program": program, "kernels": kernels, "attention_kernel": ""}
    assert vocabulary.with_kernels(programs.NANOTRON, cells).kernels == expected


def test_unknown_class_is_refused() -> None:
    cells = {"program": "", "kernels": "quick", "attention_kernel": ""}
    with pytest.raises(UnusableRow, match='kernels = "quick" is not known; write eager, compiled'):
        vocabulary.with_kernels(programs.NANOTRON, cells)


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("FSDP, parameters not resharded", "per_step"),
        ("FSDP", "per_microbatch"),
        ("FSDP2 (reshard_after_forward=False)", "per_step"),
        ("3 (FSDP2)", "per_microbatch"),
        ("FSDP2, reshard_after_forward: always", "per_microbatch"),
        ("3, no resharding", "per_step"),
    ],
)
def test_weights_that_are_not_resharded_are_gathered_once(text: str, weights: str) -> None:
    assert vocabulary.weights_of(text) == weights


@pytest.mark.parametrize(
    ("text", "shards"),
    [
        ("3 (HSDP)", 8),
        ("FSDP, hybrid, 16 shards", 16),
        ("3", 0),
        ("3 (FSDP2)", 0),
        ("ZeRO-3", 0),
        ("FSDP, shards of 4", 4),
        ("3, inside a node", 8),
    ],
)
def test_hierarchical_sharding_in_words(text: str, shards: int) -> None:
    assert vocabulary.shards_of(text, 8) == shards


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("a 250k vocabulary", 250_000),
        ("BLOOM's 250,880", 250_880),
        ("50257 tokens", 50_257),
        ("32.1K", 32_100),
        ("250k, padded to 250,880", 250_880),
        ("Llama 3's", None),
        ("GPT-2's", None),
        ("cl100k_base", None),
    ],
)
def test_vocabularies_in_words(text: str, size: int | None) -> None:
    assert number_in(text) == size


def test_sequence_parallelism_in_words() -> None:
    assert vocabulary.is_yes("seq_parallel", "Yes") and not vocabulary.is_yes("seq_parallel", "no")
    with pytest.raises(UnusableRow, match='seq_parallel = "ulysses" is not known; write yes or no'):
        vocabulary.is_yes("seq_parallel", "ulysses")


def test_notes_that_deny_adapters_skip_no_row() -> None:
    vocabulary.refuse_adapters(
        {"notes": "full training, no LoRA; not frozen", "source_ref": "LoRA"}
    )
    with pytest.raises(UnusableRow, match='"lora" in notes'):
        vocabulary.refuse_adapters({"notes": "no dropout, LoRA"})
