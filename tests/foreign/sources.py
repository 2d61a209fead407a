"""Runs of DeepSpeed, torch and transformers' Trainer on CPUs: 5 steps, saved after 3.

Each returns the losses of its steps and its last weights, in the order of `parameters` of the
model, for which they were trained with the samples that our own loader hands out.
"""

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

VOCABULARY = 264
LENGTH = 16
BATCH = 4
STEPS = 5
SAVED = 3
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
}
RATE = 1e-3
OPTIMIZER = {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "weight_decay": 0.0}}
SCHEDULER = {
    "type": "WarmupLR",
    "params": {"warmup_num_steps": 4, "warmup_max_lr": RATE, "warmup_type": "linear"},
}


def write_config(root, *, tied=False, family="llama", sizes=SIZES, warmup=None):
    """Write the ids of a corpus and the config with which a run goes on here; return its path.

    - `warmup`: steps of a linear warm-up by `lr_schedule`; None for DeepSpeed's scheduler.
    """
    ids = np.random.default_rng(0).integers(1, VOCABULARY, size=6000).astype("uint16")
    ids[99::100] = 0
    ids.tofile(root / "ids.bin")
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": OPTIMIZER,
        "scheduler": SCHEDULER,
        "zero_optimization": {"stage": 1},
        "parallel3d": {
            "mesh": {"pp": 1, "dp": 1, "tp": 1},
            "model": {"family": family, **sizes},
            "data": {
                "source": "tokens",
                "paths": [str(root / "ids.bin")],
                "tokenizer": "none",
                "vocab_size": VOCABULARY,
                "end_of_text_id": 0,
                "sequence_length": LENGTH,
                "cache": str(root / "cache"),
            },
            "train": {"steps": STEPS, "evaluate_every": 0},
            "checkpoint": {"every": SAVED},
        },
    }
    if family == "llama":
        config["parallel3d"]["model"]["tie_word_embeddings"] = tied
    if warmup is not None:
        del config["scheduler"]
        config["gradient_clipping"] = 0.0  # DeepSpeed's default, and ours, is 1
        config["parallel3d"]["train"]["lr_schedule"] = {"type": "constant", "warmup_steps": warmup}
    path = root / "ds.json"
    path.write_text(json.dumps(config))
    return path


def samples(path):
    """The samples of the run's steps, each with the token that follows: [step, sample, token]."""
    from parallel3d.config import RunConfig
    from parallel3d.data.batches import Batches
    from parallel3d.data.prepare import prepare

    config = RunConfig.from_json(str(path))
    loader = Batches(prepare(config.data).train, LENGTH, config.train.seed)
    tokens, labels = loader.microbatch(0, STEPS * BATCH)
    windows = np.concatenate([tokens, labels[:, -1:]], axis=1)
    return torch.from_numpy(windows).view(STEPS, BATCH, LENGTH + 1)


def llama(*, tied=False, dtype=torch.float32):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config).to(dtype)


def loss_of(logits, windows):
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def join():
    """Join gloo's group, without what DeepSpeed compiles: its operator for CPUs, and its Muon."""
    import deepspeed

    from parallel3d.engine.quirks import core

    core.skip_shared_memory_operator()
    core.leave_muon_uncompiled()
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo", dist_init_required=False)
    return deepspeed


def mean(loss):
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def own_share(windows, rank):
    size = BATCH // dist.get_world_size()
    return windows[rank * size : (rank + 1) * size]


def as_arrays(model):
    return {name: p.detach().float().numpy().copy() for name, p in model.named_parameters()}


def by_deepspeed(rank, root, windows, stage, extra=None, client=None, tied=False):
    """Train by DeepSpeed's engine, on any number of ranks."""
    deepspeed = join()
    model = llama(tied=tied)
    settings = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": stage},
        "optimizer": OPTIMIZER | {"params": OPTIMIZER["params"] | {"torch_adam": True}},
        "scheduler": SCHEDULER,
        "steps_per_print": 1000,
    }
    engine, *_ = deepspeed.initialize(model=model, config=settings | (extra or {}))
    losses = []
    for step in range(STEPS):
        own = own_share(windows[step], rank)
        loss = loss_of(engine(own[:, :-1]).logits, own)
        engine.backward(loss)
        engine.step()
        losses.append(mean(loss))
        if step + 1 == SAVED:
            engine.save_checkpoint(str(root), client_state=client or {})
    gathered = nullcontext()
    if stage == 3:
        gathered = deepspeed.zero.GatheredParameters([*model.parameters()])
    with gathered:
        return losses, as_arrays(engine.module)


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, SIZES["hidden_size"])
        nn.init.normal_(self.word_embeddings.weight, std=0.02)

    def forward(self, tokens):
        return self.word_embeddings(tokens)


def output_of(embed, x):
    return F.linear(x, embed.word_embeddings.weight)


class Block(nn.Module):
    """A block of transformers with its positions and its mask, as a layer of a pipeline."""

    def __init__(self, layer, positions):
        super().__init__()
        self.layer = layer
        self._positions = [positions]

    def forward(self, x):
        length = x.shape[1]
        places = torch.arange(length)[None]
        mask = torch.full((length, length), -1e9).triu(1)[None, None]
        turns = self._positions[0](x, places)
        out = self.layer(x, position_embeddings=turns, attention_mask=mask, position_ids=places)
        return out if isinstance(out, torch.Tensor) else out[0]


NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": VOCABULARY,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}


def neox():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(**{name: x for name, x in NEOX.items() if name != "model_type"})
    config._attn_implementation = "eager"
    return GPTNeoXForCausalLM(config)


class Output(nn.Module):
    """The last layer of GPT-NeoX's pipeline."""

    def __init__(self):
        super().__init__()
        self.final_linear = nn.Linear(SIZES["hidden_size"], VOCABULARY, bias=False)
        nn.init.normal_(self.final_linear.weight, std=0.02)

    def forward(self, x):
        return self.final_linear(x)


def by_pipeline(rank, root, windows, stage, named="llama"):
    """Train by DeepSpeed's pipeline engine, on two stages that share the embedding.

    - `named`: "llama", or "neox" for GPT-NeoX's layers, which have an output of their own.
    """
    deepspeed = join()
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    if named == "neox":
        whole = neox()
        base = whole.gpt_neox
        norm = base.final_layer_norm
    else:
        whole = llama(tied=True)
        base = whole.model
        norm = base.norm
    layers = [*base.layers]

    tied = partial(TiedLayerSpec, "embed", tied_weight_attr="word_embeddings.weight")
    blocks = [LayerSpec(Block, layer, base.rotary_emb) for layer in layers]

    def loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    if named == "neox":
        # GPT-NeoX has a layer without parameters before its blocks, and one after them.
        specs = [LayerSpec(Embed), lambda x: x, *blocks, lambda x: x, norm, LayerSpec(Output)]
    else:
        last = tied(Embed, forward_fn=output_of)
        specs = [tied(Embed), *blocks, lambda x: x, norm, last]
    net = PipelineModule(
        specs,
        num_stages=2,
        loss_fn=loss,
        partition_method="uniform",
    )
    settings = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": OPTIMIZER | {"params": OPTIMIZER["params"] | {"torch_adam": True}},
        "scheduler": SCHEDULER,
        "steps_per_print": 1000,
    }
    engine, *_ = deepspeed.initialize(model=net, config=settings)
    losses = []
    for step in range(STEPS):
        halves = [(half[:, :-1], half[:, 1:]) for half in windows[step].split(2)]
        losses.append(float(engine.train_batch(iter(halves))))
        if step + 1 == SAVED:
            engine.save_checkpoint(str(root))
    rename = _of_neox if named == "neox" else _of_pipeline
    return losses, dict(rename(net))


def _of_neox(net):
    """The weights of a stage of GPT-NeoX under transformers' names."""
    for name, value in as_arrays(net).items():
        number, _, leaf = name.partition(".")
        if leaf == "word_embeddings.weight":
            yield "gpt_neox.embed_in.weight", value
        elif leaf == "final_linear.weight":
            # Its name in files, and in the modules of transformers from 5 on.
            yield "embed_out.weight", value
            yield "lm_head.weight", value
        elif leaf in ("weight", "bias"):
            yield f"gpt_neox.final_layer_norm.{leaf}", value
        else:
            yield f"gpt_neox.layers.{int(number) - 2}.{leaf.removeprefix('layer.')}", value


def _of_pipeline(net):
    """The weights of this stage under transformers' names."""
    for name, value in as_arrays(net).items():
        number, _, leaf = name.partition(".")
        if number == "tied_modules":
            yield "model.embed_tokens.weight", value
        elif leaf == "weight":
            yield "model.norm.weight", value
        else:
            yield f"model.layers.{int(number) - 1}.{leaf.removeprefix('layer.')}", value


def by_fsdp(rank, root, windows, style):
    """Train by FSDP2 and torch's AdamW, and save by torch's distributed checkpoints.

    - `style`: "nested", as torch's guide does; "flat", as torchtitan does; "numbered", with the
      optimizer's own state_dict; "accelerate", by its functions.
    """
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    losses = []
    for step in range(STEPS):
        own = own_share(windows[step], rank)
        loss = loss_of(model(own[:, :-1]).logits, own)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(mean(loss))
        if step + 1 != SAVED:
            continue
        weights = get_model_state_dict(model)
        if style == "nested":
            moments = get_optimizer_state_dict(model, optimizer)
            save({"model": weights, "optimizer": moments}, checkpoint_id=root)
        elif style == "flat":
            flat = StateDictOptions(flatten_optimizer_state_dict=True)
            moments = get_optimizer_state_dict(model, optimizer, options=flat)
            state = {"step": torch.tensor(SAVED, dtype=torch.int32)}
            entries = {"optimizer": moments, "train_state": state}
            save({**weights, **entries, "lr_scheduler": schedule.state_dict()}, checkpoint_id=root)
        elif style == "numbered":
            moments = optimizer.state_dict()
            save({"model": model.state_dict(), "optimizer": moments}, checkpoint_id=root)
        else:
            save_by_accelerate(model, optimizer, root)
    final = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return losses, {name: value.numpy() for name, value in final.items()}


def save_by_accelerate(model, optimizer, root):
    """Save with accelerate's own functions for FSDP2 and SHARDED_STATE_DICT."""
    from types import SimpleNamespace

    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    PartialState(cpu=True)  # accelerate's logger asks for it
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", reshard_after_forward=True
    )
    accelerator = SimpleNamespace(
        process_index=dist.get_rank(),
        num_processes=dist.get_world_size(),
        is_fsdp2=True,
        wait_for_everyone=dist.barrier,
    )
    save_fsdp_model(plugin, accelerator, model, str(root))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(root))


def by_trainer(root, windows, *, decay=0.0, tied=False):
    """Train by transformers' Trainer; return losses, weights, and the folder that it has saved."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    model = llama(tied=tied)
    rows = [{"input_ids": row, "labels": row} for row in windows.flatten(0, 1)]
    arguments = TrainingArguments(
        output_dir=str(root),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=RATE,
        adam_beta2=0.95,
        weight_decay=decay,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        save_steps=SAVED,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    losses = []

    class Logged(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    class InOrder(Trainer):
        def _get_train_sampler(self, *_, **__):
            return torch.utils.data.SequentialSampler(rows)

    trainer = InOrder(model=model, args=arguments, train_dataset=rows, callbacks=[Logged()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return losses, as_arrays(model), Path(root, f"checkpoint-{SAVED}")
