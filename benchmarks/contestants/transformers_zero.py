"""(d) transformers' GPT-2 with the same weights under DeepSpeed ZeRO, data-parallel alone."""

import common
import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

after_imports = common.resident_bytes()
options = common.arguments(stage=3, thresholds=False)
deepspeed.init_distributed(dist_backend="gloo")
dp = dist.get_world_size()
count = common.GLOBAL // common.MICRO // dp
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=common.VOCAB,
        n_positions=common.SEQ,
        n_embd=common.HIDDEN,
        n_layer=common.LAYERS,
        n_head=common.HEADS,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
)

embed, *blocks, _, head = common.layers()
with torch.no_grad():
    body = model.transformer
    width = common.HIDDEN
    body.wte.weight.copy_(embed.token.weight)
    body.wpe.weight.copy_(embed.position.weight)
    for theirs, mine in zip(body.h, blocks, strict=True):
        by_head = mine.qkv.weight.view(common.HEADS, 3, -1, width)
        theirs.attn.c_attn.weight.copy_(by_head.transpose(0, 1).reshape(3 * width, width).T)
        theirs.attn.c_attn.bias.zero_()
        pairs = {"attn.c_proj": mine.proj, "mlp.c_fc": mine.up, "mlp.c_proj": mine.down}
        for name, linear in pairs.items():
            theirs.get_submodule(name).weight.copy_(linear.weight.T)
            theirs.get_submodule(name).bias.zero_()
    model.lm_head.weight.copy_(head.weight)
del embed, blocks, head
model.train()
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config=common.deepspeed_config(options.stage, dp),
)


def step(tokens: Tensor, labels: Tensor) -> Tensor | None:
    total = torch.zeros(())
    for x, y in common.microbatches(tokens, labels):
        loss = common.loss_fn(engine(input_ids=x).logits, y)
        engine.backward(loss)
        engine.step()
        total += loss.detach() / count
    return total


common.compete(options, step, dp_coord=dist.get_rank(), dp=dp, after_imports=after_imports)
dist.destroy_process_group()
