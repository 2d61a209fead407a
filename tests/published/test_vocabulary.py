"""What the words of a table mean, in the spellings that people use."""

import pytest

from benchmarks.published import programs, vocabulary
from benchmarks.published.cells import UnusableRow

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
        ("Megatron-LM", None),  # of 2021, or on Megatron-Core?
        ("DeepSpeed ZeRO-3", None),
    ):
        assert programs.named(text) is program
    assert programs.names("Megatron-LM").startswith('"Megatron-LM 2021", "Megatron-Core"')


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("bf16/fp8", "fp8"), ("fp16 weights, fp32 Adam state", "fp16"), ("BFloat16", "bf16"),
        ("bf16, fp32 reductions", "bf16"), ("float8 rowwise", "fp8"), ("bf16-mixed", "bf16"),
    ],
)  # fmt: skip
def test_of_several_number_formats_the_narrowest_is_the_products(text: str, precision: str) -> None:
    assert vocabulary.precision_of(text) == precision


@pytest.mark.parametrize(
    ("text", "stage"), [("2 (FSDP SHARD_GRAD_OP)", 2), ("ZeRO-1", 1), ("3.0", 3), ("DDP", 0)]
)
def test_zero_stages_in_words(text: str, stage: int) -> None:
    assert vocabulary.zero_stage_of(text) == stage


@pytest.mark.parametrize(
    ("text", "attention", "hopper"),
    [("FlashAttention-2", "flash", False), ("flash_attn v3", "flash", True),
     ("cuDNN (TE 1.9)", "flash", True), ("Flash", "flash", True), ("eager", "classic", True)],
)  # fmt: skip
def test_attention_kernels_in_words(text: str, attention: str, hopper: bool) -> None:
    program = vocabulary.with_kernel(programs.NEMO, text)
    assert (program.attention, program.hopper, program.name) == (attention, hopper, "NeMo")


def test_notes_that_deny_adapters_leave_nothing_out() -> None:
    vocabulary.refuse_adapters(
        {"notes": "full training, no LoRA; not frozen", "source_ref": "LoRA"}
    )
    with pytest.raises(UnusableRow, match='"lora" in notes'):
        vocabulary.refuse_adapters({"notes": "no dropout, LoRA"})
