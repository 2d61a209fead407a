"""The family `moe` in plain PyTorch: experts in a loop, one process, our names of weights.

It shares no code with models/moe/blocks.py: every token is computed by itself where it matters.
"""

import torch
import torch.nn.functional as F


def norm(x, weight, eps):
    """RMSNorm over the last dim."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x, theta):
    """Rotary positions of x [batch, heads, seq, size]."""
    size = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, size, 2).to(x.dtype) / size)
    angles = torch.outer(torch.arange(x.shape[-2]).to(x.dtype), frequencies).repeat(1, 2)
    half = size // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * angles.cos() + turned * angles.sin()


def swiglu(x, gate_up, down):
    gate = x @ gate_up[0].T
    up = x @ gate_up[1].T
    return (F.silu(gate) * up) @ down.T


class Plain:
    """A model over `weights` by our names; after `loss`, what each sparse layer has decided.

    - `counts` [experts] by layer: the tokens of each expert, summed over calls.
    - `side`: the sum over layers of coefficient x side loss, of the last call.
    - `values`: each side loss by layer, of the last call.
    """

    def __init__(self, config, weights):
        self.config = config
        self.weights = weights
        self.counts = {}
        self.side = 0.0
        self.values = {}
        self.dropped = {}
        self.chosen = {}

    def loss(self, tokens, labels):
        """Mean cross-entropy of [batch, seq]."""
        return F.cross_entropy(self.logits(tokens).flatten(0, -2), labels.flatten())

    def logits(self, tokens):
        """[batch, seq, vocab]."""
        c = self.config
        w = self.weights
        self.side = 0.0
        self.values = {}
        self.pool = []
        x = w["embedding.token.weight"][tokens]
        for number in range(c.num_hidden_layers):
            own = {
                name.removeprefix(f"blocks.{number}."): value
                for name, value in w.items()
                if name.startswith(f"blocks.{number}.")
            }
            x = x + self.attention(own, norm(x, own["norm1.weight"], c.rms_norm_eps))
            y = norm(x, own["norm2.weight"], c.rms_norm_eps)
            if "mlp.router.weight" in own:
                x = x + self.experts(f"blocks.{number}", own, y)
            else:
                x = x + swiglu(y, own["mlp.gate_up.weight"], own["mlp.down.weight"])
        if c.router_aux_loss == "pooled":  # over tokens of all layers, which have as many each
            loads, shares = (sum(each) / len(each) for each in zip(*self.pool, strict=True))
            value = c.num_experts * c.num_experts_per_tok * (loads * shares).sum()
            self.side = self.side + c.router_aux_loss_coef * value
        output = w.get("head.output.weight", w["embedding.token.weight"])
        return norm(x, w["head.norm.weight"], c.rms_norm_eps) @ output.T

    def attention(self, w, x):
        c = self.config
        size = self.config.head_size
        repeated = []
        for part, heads in (("q", c.num_attention_heads), ("k", c.kv_heads), ("v", c.kv_heads)):
            y = x @ w[f"attention.qkv.{part}_weight"].T
            if f"attention.qkv.{part}_bias" in w:
                y = y + w[f"attention.qkv.{part}_bias"]
            scale = w.get(f"attention.{part}_norm.weight")
            if scale is not None and c.qk_norm_over == "width":
                y = norm(y, scale, c.rms_norm_eps)
            y = y.unflatten(-1, (heads, size))
            if scale is not None and c.qk_norm_over == "head":
                y = norm(y, scale, c.rms_norm_eps)
            y = y.transpose(1, 2)
            y = rotated(y, c.rope_theta) if part in "qk" else y
            repeated.append(y.repeat_interleave(c.num_attention_heads // heads, 1))
        q, k, v = repeated
        scores = q @ k.mT / size**0.5
        seq = scores.shape[-1]
        scores = scores.masked_fill(~torch.ones(seq, seq, dtype=bool).tril(), float("-inf"))
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        y = y @ w["attention.output.weight"].T
        return y + w["attention.output.bias"] if "attention.output.bias" in w else y

    def experts(self, layer, w, x):
        c = self.config
        experts = c.num_experts
        k = c.num_experts_per_tok
        tokens = x.flatten(0, -2)
        logits = tokens @ w["mlp.router.weight"].T
        if c.router == "sigmoid":
            scores = torch.sigmoid(logits)
            shares = scores / scores.sum(-1, keepdim=True)
        else:
            shares = scores = torch.softmax(logits, -1)
        choice = (logits if c.router == "topk_softmax" else scores).detach()
        if c.score_bias:
            choice = choice + w["mlp.router.score_bias"].detach()
        if c.n_group > 1:  # token by token
            each = experts // c.n_group
            for row in choice:
                best = [
                    row[g * each : (g + 1) * each].topk(2).values.sum() for g in range(c.n_group)
                ]
                kept = torch.stack(best).topk(c.topk_group).indices.tolist()
                for g in set(range(c.n_group)) - set(kept):
                    row[g * each : (g + 1) * each] = float("-inf")
        chosen = choice.topk(k, -1).indices
        self.chosen[layer] = chosen
        weights = torch.stack([s[i] for s, i in zip(scores, chosen, strict=True)])
        if c.router == "topk_softmax" or c.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * c.routed_scaling_factor
        y = torch.zeros_like(tokens)
        counts = torch.zeros(experts)
        limit = len(tokens) * k
        if c.capacity_factor is not None:
            limit = -(-int(c.capacity_factor * limit * 10**6) // (experts * 10**6))
        dropped = 0
        for e in range(experts):
            rows, column = (chosen == e).nonzero(as_tuple=True)
            counts[e] = len(rows)
            dropped += len(rows[limit:])
            rows = rows[:limit]
            column = column[:limit]
            out = swiglu(tokens[rows], w["mlp.experts.gate_up"][e], w["mlp.experts.down"][e])
            y = y.index_add(0, rows, out * weights[rows, column].unsqueeze(-1))
        self.counts[layer] = self.counts.get(layer, 0) + counts
        self.dropped[layer] = dropped
        self.balance(layer, logits, shares, chosen, len(x))
        if c.n_shared_experts:
            y = y + swiglu(tokens, w["mlp.shared.gate_up.weight"], w["mlp.shared.down.weight"])
        return y.view_as(x)

    def balance(self, layer, logits, shares, chosen, batch):
        c = self.config
        experts = c.num_experts
        k = c.num_experts_per_tok
        is_pooled = c.router_aux_loss == "pooled"
        parts = batch if c.router_aux_loss == "sequence" else 1
        value = 0.0
        for own, picked in zip(shares.chunk(parts), chosen.chunk(parts), strict=True):
            loads = torch.bincount(picked.flatten(), minlength=experts) / (len(own) * k)
            self.pool.append((loads, own.mean(0)))
            if not is_pooled:
                value = value + experts * (loads * own.mean(0)).sum() / parts
        z = torch.logsumexp(logits, -1).square().mean()
        self.values[layer] = {"balance": value, "z": z}
        self.side = self.side + c.router_aux_loss_coef * value + c.router_z_loss_coef * z
