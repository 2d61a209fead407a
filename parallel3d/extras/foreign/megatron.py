"""Megatron-LM's arguments, from a launch script or a file of arguments; Megatron-DeepSpeed's too.

A script is read, not run: variables that are set outside `if`, `case` and loops are followed.
"""

import re
from operator import index
from typing import Any

from parallel3d.base import reader
from parallel3d.base.reader import JsonObject
from parallel3d.extras.foreign.rules import Rule, dropped, missing, renamed
from parallel3d.model.recompute import parse

_RECOMPUTE = "parallel3d.pipeline.activation_checkpointing"

# Its name, and its values up to the next argument, a variable with more of them, or a sign
_ARGUMENT = re.compile(
    r"(?<!\S)--([A-Za-z][\w-]*)(?:=|\s+(?!--))?(.*?)(?=\s--[A-Za-z]|\s*\$\{?\w*(?:ARGS|args|options)|[|&;]|$)"
)


def _sublayers(names: str | list[str]) -> str:
    return str(parse([names] if isinstance(names, str) else names))


TABLE: dict[str, Rule] = {
    # The mesh
    **renamed(
        """
        tensor-model-parallel-size    parallel3d.mesh.tp
        pipeline-model-parallel-size  parallel3d.mesh.pp
        sequence-parallel             parallel3d.mesh.sequence_parallel
        context-parallel-size         parallel3d.mesh.cp
        zero-stage                    zero_optimization.stage
        recompute-num-layers          parallel3d.pipeline@recompute_num_layers
        """
    ),
    **missing(
        "num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank",
        'set parallel3d.pipeline: {"schedule": "interleaved", "stages_per_rank": ...}',
    ),
    "use-distributed-optimizer": Rule("zero_optimization.stage", {True: 1, False: 0}),
    **dict.fromkeys(
        ("use-torch-fsdp2", "use-megatron-fsdp"), Rule("zero_optimization.stage", {True: 3})
    ),
    "optimizer-cpu-offload": Rule("zero_optimization.offload_optimizer.device", {True: "cpu"}),
    "recompute-granularity": Rule(_RECOMPUTE, {"full": "full", "selective": "selective"}),
    "recompute-activations": Rule(_RECOMPUTE, {True: "selective"}),
    **dict.fromkeys(
        (
            "checkpoint-activations",
            "deepspeed-activation-checkpointing",
            "activations-checkpoint-method",
        ),
        Rule(_RECOMPUTE, lambda _: "full"),
    ),
    "recompute-modules": Rule("parallel3d.pipeline@recompute_modules", _sublayers),
    "recompute-method": Rule("parallel3d.pipeline@recompute_method", plain=("uniform",)),
    # The model
    **renamed(
        """
        num-layers               parallel3d.model.num_hidden_layers
        hidden-size              parallel3d.model.hidden_size
        ffn-hidden-size          parallel3d.model.intermediate_size
        num-attention-heads      parallel3d.model.num_attention_heads
        num-query-groups         parallel3d.model.num_key_value_heads
        num-key-value-heads      parallel3d.model.num_key_value_heads
        kv-channels              parallel3d.model.head_dim
        max-position-embeddings  parallel3d.model.max_position_embeddings
        rotary-percent           parallel3d.model.config@rotary_pct
        rotary-base              parallel3d.model@rope_theta
        norm-epsilon             parallel3d.model@norm_eps
        layernorm-epsilon        parallel3d.model@norm_eps
        add-qkv-bias             parallel3d.model.attention_bias
        qk-layernorm             parallel3d.model.qk_norm
        init-method-std          parallel3d.model.initializer_range
        hidden-dropout           parallel3d.model@dropout
        attention-dropout        parallel3d.model.attn_pdrop@attention_dropout
        vocab-size               parallel3d.model.vocab_size
        """
    ),
    **dropped("group-query-attention", "as num-query-groups says"),
    "position-embedding-type": Rule(
        "parallel3d.model.family@position",
        {"rope": "rotary", "learned_absolute": "learned"},
        verdict="REFUSED",
    ),
    "use-rotary-position-embeddings": Rule("parallel3d.model.family@position", {True: "rotary"}),
    **dropped("no-position-embedding", "as the type of the positions says"),
    "no-rope-freq": Rule(
        "parallel3d.model.config@no_rope_layers",
        index,
        verdict="REFUSED",
        why="must be a number: every n-th layer has no positions",
    ),
    **missing("use-rope-scaling", "set parallel3d.model.rope_scaling"),
    **missing("rotary-interleaved", "pairs are i and i + half"),
    "normalization": Rule(
        "parallel3d.model.family@norm",
        {
            "LayerNorm": "layernorm",
            "layernorm": "layernorm",
            "RMSNorm": "rmsnorm",
            "rmsnorm": "rmsnorm",
        },
        verdict="REFUSED",
    ),
    **dropped("apply-layernorm-1p", "another way to store the same norm"),
    "swiglu": Rule("parallel3d.model.family@mlp", {True: "swiglu", False: "gelu"}),
    **missing("squared-relu openai-gelu", "no family has it", verdict="REFUSED"),
    "no-bias-gelu-fusion": Rule("parallel3d.model.config@gelu", {True: "gelu", False: "gelu_fast"}),
    "disable-bias-linear": Rule("parallel3d.model.family@bias", {True: False, False: True}),
    "untie-embeddings-and-output-weights": Rule(
        "parallel3d.model.tie_word_embeddings", {True: False, False: True}
    ),
    **dropped("make-vocab-size-divisible-by", "vocabularies are cut without padding"),
    **missing("window-size", "attention sees the whole sequence"),
    **missing(
        "num-experts expert-model-parallel-size expert-tensor-parallel-size moe-router-topk "
        "moe-router-load-balancing-type moe-aux-loss-coeff moe-token-dispatcher-type "
        "moe-grouped-gemm",
        "write family moe by hand",
        verdict="REFUSED",
    ),
    **missing("multi-latent-attention mtp-num-layers", "no family has it", verdict="REFUSED"),
    # Batch, length and optimizer
    **renamed(
        """
        micro-batch-size    train_micro_batch_size_per_gpu
        global-batch-size   train_batch_size
        seq-length          parallel3d.data.sequence_length
        train-iters         parallel3d.train.steps@steps
        train-samples       parallel3d.train.steps@steps in samples
        lr                  optimizer.params.lr
        min-lr              parallel3d.train.lr_schedule.min_ratio@min_lr
        lr-wsd-decay-iters  parallel3d.train.lr_schedule.decay_steps@last
        lr-decay-iters      parallel3d.train.lr_schedule@end
        lr-decay-samples    parallel3d.train.lr_schedule@end in samples
        lr-warmup-iters     parallel3d.train.lr_schedule.warmup_steps@warmup_steps
        lr-warmup-samples   parallel3d.train.lr_schedule.warmup_steps@warmup_steps in samples
        lr-warmup-fraction  parallel3d.train.lr_schedule.warmup_steps@warmup_fraction
        weight-decay        optimizer.params.weight_decay
        adam-beta1          optimizer.params.betas@beta1
        adam-beta2          optimizer.params.betas@beta2
        adam-eps            optimizer.params.eps
        clip-grad           gradient_clipping
        """
    ),
    **missing("rampup-batch-size", "write it as parallel3d.train.batch_schedule"),
    **missing("optimizer", "AdamW is the only one", "adam"),
    **missing("decoupled-lr decoupled-min-lr", "embedding and output have the same rate"),
    "lr-decay-style": Rule(
        "parallel3d.train.lr_schedule.type@style",
        {"linear": "linear", "cosine": "cosine", "constant": "constant", "WSD": "wsd"},
    ),
    "lr-wsd-decay-style": Rule(
        "parallel3d.train.lr_schedule.type@shape",
        lambda shape: {"minus_sqrt": "1-sqrt"}.get(shape, shape),
    ),
    **dropped("calculate-per-token-loss", "all samples have the same number of tokens"),
    # Precision
    **renamed(
        """
        bf16               bf16.enabled
        fp16               fp16.enabled
        loss-scale         fp16.loss_scale
        min-loss-scale     fp16.min_loss_scale
        loss-scale-window  fp16.loss_scale_window
        hysteresis         fp16.hysteresis
        """
    ),
    "initial-loss-scale": Rule(
        "fp16.initial_scale_power", lambda scale: int(scale).bit_length() - 1
    ),
    "grad-reduce-in-bf16": Rule("communication_data_type", {True: "bf16"}),
    **dropped("accumulate-allreduce-grads-in-fp32", "gradients are added in fp32"),
    **missing(
        "fp8-format fp8-hybrid fp8-amax-history-len fp8-amax-compute-algo fp8-param-gather "
        "fp8-margin fp8-interval fp8-recipe",
        "products are never in fp8",
    ),
    # Data
    **renamed(
        """
        tokenizer-model       parallel3d.data.tokenizer@tokenizer_path
        reset-attention-mask  parallel3d.data.isolate_documents
        """
    ),
    "data-path": Rule(
        "parallel3d.data.paths@files", lambda words: words if isinstance(words, list) else [words]
    ),
    **dropped("mock-data", "set parallel3d.data"),
    **dropped("split", "see parallel3d.data.held_out_fraction"),
    **missing("data-impl", "files are mapped into memory", "mmap", "infer"),
    "tokenizer-type": Rule(
        "parallel3d.data.tokenizer@tokenizer",
        {
            "GPT2BPETokenizer": "gpt2",
            "HuggingFaceTokenizer": "path",
            "Llama2Tokenizer": "folder",
            "Llama3Tokenizer": "folder",
            "SentencePieceTokenizer": "folder",
            "GPTSentencePieceTokenizer": "folder",
        },
        why="set parallel3d.data.tokenizer",
    ),
    **dropped("vocab-file merge-file", "are in the tokenizer's folder"),
    **dropped("reset-position-ids", "belongs to parallel3d.data.isolate_documents"),
    # Evaluation, checkpoints and output
    **renamed(
        """
        eval-interval  parallel3d.train.evaluate_every
        save-interval  parallel3d.checkpoint.every
        seed           parallel3d.train.seed
        """
    ),
    **dropped("eval-iters", "set parallel3d.train.evaluate_samples"),
    **missing("finetune", "weights come over through Hugging Face: set model.from_pretrained"),
    **missing("deepspeed-config", "add its settings: they have the same names here"),
    **dropped(
        "save load no-load-optim no-load-rng no-save-optim no-save-rng ckpt-format async-save "
        "use-dist-ckpt use-checkpoint-args exit-on-missing-checkpoint exit-interval "
        "exit-duration-in-mins",
        "see parallel3d.checkpoint and parallel3d.run",
    ),
    **dropped(
        "log-interval log-throughput log-timers-to-tensorboard log-batch-size-to-tensorboard "
        "log-validation-ppl-to-tensorboard log-params-norm log-num-zeros-in-grad log-progress "
        "log-memory-to-tensorboard tensorboard-dir tensorboard-queue-size timing-log-level "
        "tensorboard-log-interval wandb-project wandb-exp-name wandb-save-dir",
        "see steps_per_print and run.trackers",
    ),
    **dropped(
        "profile profile-step-start profile-step-end profile-ranks use-pytorch-profiler",
        "set parallel3d.train.profile",
    ),
    **dropped(
        "attention-backend use-flash-attn transformer-impl use-mcore-models DDP-impl "
        "no-masked-softmax-fusion no-bias-dropout-fusion no-bias-swiglu-fusion no-rope-fusion "
        "no-gradient-accumulation-fusion no-async-tensor-model-parallel-allreduce "
        "cross-entropy-loss-fusion cross-entropy-fusion-impl overlap-grad-reduce "
        "overlap-param-gather tp-comm-overlap use-contiguous-parameters-in-local-ddp manual-gc "
        "manual-gc-interval empty-unused-memory-level num-workers dataloader-type "
        "data-cache-path no-create-attention-mask-in-dataloader no-mmap-bin-files "
        "use-cpu-initialization attention-softmax-in-fp32 no-query-key-layer-scaling "
        "apply-query-key-layer-scaling",
        "the device and the mesh decide",
    ),
    **dropped(
        "nproc-per-node nnodes node-rank master-addr master-port distributed-backend "
        "distributed-timeout-minutes local-rank rdzv-id rdzv-backend rdzv-endpoint deepspeed "
        "container-image container-mounts output",
        "the launcher's",
    ),
}
DEFAULTS: dict[str, Any] = {
    "position-embedding-type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "disable-bias-linear": False,
    "untie-embeddings-and-output-weights": False,
    "hidden-dropout": 0.1,
    "attention-dropout": 0.1,
    "use-distributed-optimizer": False,
    "weight-decay": 0.01,
    "lr-decay-style": "linear",
    "min-lr": 0.0,
    "seed": 1234,
    "tokenizer-type": "GPT2BPETokenizer",
}


def complete(values: dict[str, Any]) -> None:
    """Combine what several arguments say: betas, recomputation, the data, the width of a SwiGLU."""
    if values.get(_RECOMPUTE) == "selective":
        values[_RECOMPUTE] = values.get("@recompute_modules", "selective")
    elif values.get("@recompute_method") == "block":
        values[_RECOMPUTE] = {"full": values.get("@recompute_num_layers", 1)}
    values["optimizer.params.betas"] = [values.get("@beta1", 0.9), values.get("@beta2", 0.999)]
    words = values.get("@files", [""])
    if not isinstance(words[0], str):
        values |= {"@weights": words[::2], "@files": words[1::2]}
    hidden = values.get("parallel3d.model.hidden_size")
    if hidden and values.get("@mlp") == "swiglu":
        values.setdefault("parallel3d.model.intermediate_size", int(hidden * 8 / 3 / 64) * 64)


class Unread(str):
    """A value that only the running script knows, as the script writes it."""


def arguments(text: str) -> JsonObject:
    """Return the values of all arguments in a script or a file of arguments; True without a value.

    A value is `Unread` if it depends on what the script finds, or stands in a branch.
    """
    values: JsonObject = {}
    variables: dict[str, str] = {}
    depth = 0  # how many branches are open
    text = re.sub(r"(?m)(^|\s)#.*$", "", text)  # comments
    for line in re.sub(r"\\\n", " ", text).split("\n"):
        words = _expanded(line, variables)
        first = words.partition(" ")[0]
        depth -= first in ("fi", "done", "esac")
        assignment = re.match(r"(?:export )?(\w+)=(.*)", words)
        if assignment and not depth and "--" not in line:
            variables[assignment[1]] = assignment[2].strip()
        for flag, rest in re.findall(_ARGUMENT, words):
            words_read = [reader.value(re.sub(r"^\.(?=\d)", "0.", word)) for word in rest.split()]
            value: object = words_read
            if not words_read:
                value = True
            elif len(words_read) == 1:
                value = words_read[0]
            if depth or re.search(r"[$`<]", rest):  # also a place to fill in: <PATH TO DATA>
                value = Unread("in a branch" if depth else rest)
            if not depth or flag.replace("_", "-") not in values:  # a branch changes no argument
                values[flag.replace("_", "-")] = value
        depth += first in ("if", "for", "while", "until", "case")
    return values


def _expanded(line: str, variables: dict[str, str]) -> str:
    """Return a line without quotes and brackets, with known variables and defaults in place."""
    line = re.sub(r"\$\(.*\)", "$(...)", line)
    for _ in range(3):  # a default may have another variable in it
        line = re.sub(
            r"\$\{?(\w+)(?::?-([^{}]*))?\}?(?!\[)",
            lambda m: variables.get(m[1], m[0] if m[2] is None else m[2]),
            line,
        )
    return " ".join(re.sub(r"[\"'()]", " ", line).split())
