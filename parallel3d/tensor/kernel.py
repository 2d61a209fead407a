"""Which kernel computes attention: torch chooses among several that differ tenfold (floor 2)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from parallel3d.tensor.attention import CausalAttention
from parallel3d.tensor.documents import in_one_kernel


def kernel_of(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> SDPBackend:
    """The kernel that torch takes for causal attention of these tensors, on their device.

    q [batch, heads, seq, size]; k, v with as many heads, or a divisor of it.
    """
    choice = torch._fused_sdp_choice(
        q, k, v, None, dropout, True, scale=None, enable_gqa=k.shape[1] != q.shape[1]
    )
    return SDPBackend(choice)


def in_words(kernel: SDPBackend, q: Tensor, isolated: str = "") -> str:
    """What a run's log says of its attention: the kernel, or a warning that there is none.

    `isolated`: how documents that do not see each other are computed, if they are.
    """
    if kernel != SDPBackend.MATH:
        name = kernel.name.lower().removesuffix("_attention").replace("_", " ")
        return f"kernel  attention runs as {name}{isolated and ', ' + isolated}"
    batch, heads, seq, _ = q.shape
    mib = batch * heads * seq * seq * 4 / 2**20
    return (
        "kernel  WARNING: no fused kernel of this device takes this attention, so each layer holds "
        f"all scores, {mib:,.0f} MiB, several times over{isolated and ' (of documents: theirs)'}; "
        "bf16, or an attention dropout of 0, may have one"
    )


def say_kernel(
    stages: nn.Module,
    say: Callable[[str], None],
    *,
    batch: int,
    seq: int,
    dtype: torch.dtype,
    device: torch.device,
    isolated: bool,
) -> None:
    """Say which kernel will compute attention, if one of these `stages` has any.

    `batch` samples of `seq` tokens; `isolated`: documents do not see each other. torch decides by
    the sizes, strides and kinds of tensors, so it is shown some that are like a step's.
    """
    first = next((m for m in stages.modules() if isinstance(m, CausalAttention)), None)
    if first is None:
        return
    q_heads, kv_heads = first.heads_here
    like = partial(torch.empty, dtype=dtype, device=device, requires_grad=True)
    q = like(batch, seq, q_heads, first.head_size).transpose(1, 2)
    k, v = (like(batch, seq, kv_heads, first.head_size).transpose(1, 2) for _ in range(2))
    dropout = first.dropout.p
    if isolated and in_one_kernel(q, dropout):
        say(in_words(SDPBackend.FLASH_ATTENTION, q, "all documents at once"))
        return
    say(in_words(kernel_of(q, k, v, dropout), q, "one document at a time" if isolated else ""))
