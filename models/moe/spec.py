"""Llama-like models whose MLP is a mixture of experts in some layers, as data.

By its settings the family is Mixtral (arXiv:2401.04088), Qwen3-MoE (arXiv:2505.09388) or OLMoE
(arXiv:2409.02060), and it has the routing of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).
Settings have the names of transformers; blocks.py has the modules.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from parallel3d.base.section import Problem
from parallel3d.model.module_cost import ExpertsCost
from parallel3d.model.spec import LayerSpec, ParamSpec
from parallel3d.models.common import ZEROS, Positive, divisor_below, weight_inits
from parallel3d.models.llama import spec as llama

_EXPERTS_TP_2 = ("experts", None, "tensor")


class Config(llama.Config):
    """The settings of one model with experts."""

    family: Literal["moe"]  # type: ignore[assignment]
    """The model family: the name of a folder in models/."""
    num_experts: Positive = 8
    """Experts per sparse layer, of which each token is sent to num_experts_per_tok."""
    num_experts_per_tok: Positive = 2
    """Experts per token."""
    moe_intermediate_size: Positive | None = None
    """Inner width of each expert; null means intermediate_size, as in Mixtral and OLMoE."""
    n_shared_experts: int = Field(default=0, ge=0)
    """Experts to which every token is sent; they are one MLP of that many times the width."""
    first_k_dense_replace: int = Field(default=0, ge=0)
    """The first layers up to this number have an ordinary MLP of width intermediate_size."""
    decoder_sparse_step: Positive = 1
    """Every so many layers one has experts, from the layer of this number (from 1) on."""
    router: Literal["softmax_topk", "topk_softmax", "sigmoid"] = "softmax_topk"
    """How scores become weights. "softmax_topk": the largest of the softmax over all experts.
    "topk_softmax": the softmax of the largest scores. "sigmoid": the largest sigmoids, as in
    DeepSeek-V3."""
    norm_topk_prob: bool = True
    """Divide a token's weights by their sum; released Qwen3 models and Mixtral do, OLMoE does not.
    No effect with "topk_softmax", whose weights have the sum 1."""
    routed_scaling_factor: float = Field(default=1.0, gt=0)
    """Multiplies the outputs of the experts, except the shared ones; 2.5 in DeepSeek-V3."""
    n_group: Positive = 1
    """Groups of experts; each token is sent to experts of topk_group of them."""
    topk_group: Positive = 1
    """Groups per token: those whose two best experts have the largest sum of scores."""
    score_bias: bool = False
    """A bias per expert, added to the scores for the choice alone (e_score_correction_bias in
    DeepSeek-V3). Each step it grows by score_bias_rate for experts with less than the mean load,
    and shrinks for those with more (arXiv:2408.15664)."""
    score_bias_rate: float = Field(default=1e-3, ge=0)
    """The step of score_bias; 0 keeps the bias as it is."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the balance loss in the training loss, summed over layers; 0: no such loss."""
    router_aux_loss: Literal["microbatch", "sequence", "pooled"] = "microbatch"
    """The tokens over which the balance loss compares loads, layer by layer: those of a microbatch
    on one dp rank, as in Megatron-LM, or those of each sequence. It is 1 at balance. "pooled":
    those of a microbatch in all layers together, as in transformers; it is num_experts_per_tok at
    balance, and needs a pipeline of one stage."""
    router_z_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the mean square of the scores' logsumexp (arXiv:2202.08906), summed over layers."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """Most tokens per expert and microbatch in training, relative to the mean; tokens beyond skip
    the expert. null: no limit, no token is dropped."""
    mlp_bias: Literal[False] = False
    """Experts have no biases."""
    qk_norm_over: Literal["head", "width"] = "head"
    """The features that qk_norm norms together: those of each head, as in Qwen3, or of all heads,
    as in OLMoE."""
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1)
    """The share of each head's features that is rotated, the first ones; 0.5 in GLM-4.5."""

    @property
    def rotary_size(self) -> int:
        """Rotated features of each head."""
        return int(self.head_size * self.partial_rotary_factor)

    @property
    def norms_width(self) -> bool:
        """True if qk_norm norms the features of all heads together."""
        return self.qk_norm_over == "width"

    @property
    def expert_size(self) -> int:
        """Inner width of an expert, resolved."""
        return self.moe_intermediate_size or self.inner_size

    @property
    def inner_sizes(self) -> dict[str, int]:
        """The inner widths that tp cuts, by setting."""
        is_dense = not all(map(self.is_sparse, range(self.num_hidden_layers)))
        sizes = {"intermediate_size": self.inner_size} if is_dense else {}
        own = "intermediate_size" if self.moe_intermediate_size is None else "moe_intermediate_size"
        return sizes | {own: self.expert_size}

    @property
    def divides_weights(self) -> bool:
        """True if the weights of a token's experts have the sum 1."""
        return self.norm_topk_prob or self.router == "topk_softmax"

    @property
    def side_losses(self) -> dict[str, float]:
        """The coefficients of the side losses of a sparse layer, by name."""
        return {"balance": self.router_aux_loss_coef, "z": self.router_z_loss_coef}

    def is_sparse(self, number: int) -> bool:
        """True if the block of this number, from 0, has experts."""
        is_late = number >= self.first_k_dense_replace
        return is_late and (number + 1) % self.decoder_sparse_step == 0

    def _problems(self) -> Iterator[Problem]:
        yield from super()._problems()
        experts = self.num_experts
        k = self.num_experts_per_tok
        groups = self.n_group
        size = self.head_size
        turning = self.rotary_size
        fits = experts % groups == 0
        most = self.topk_group * experts // groups
        if size and size % 2 == 0 and (turning % 2 or not turning):
            yield Problem(
                "partial_rotary_factor",
                self.partial_rotary_factor,
                f"rotates {turning} of {size} features; use an even number",
                f"use {max(2, turning // 2 * 2) / size:g}",
            )
        if k > experts:
            yield Problem(
                "num_experts_per_tok",
                k,
                f"is more than num_experts={experts}",
                f"use {experts} or less",
            )
        if not fits:
            yield Problem(
                "n_group",
                groups,
                f"does not divide num_experts={experts}",
                f"use {divisor_below(experts, groups)}",
            )
        if fits and self.topk_group > groups:
            yield Problem(
                "topk_group",
                self.topk_group,
                f"is more than n_group={groups}",
                f"use {groups} or less",
            )
        if fits and self.topk_group <= groups and most < k <= experts:
            yield Problem(
                "num_experts_per_tok",
                k,
                f"is more than the {most} experts of topk_group={self.topk_group} groups",
                f"use {most} or less, or a larger topk_group",
            )
        if groups > 1 and experts == groups:
            yield Problem(
                "n_group",
                groups,
                "leaves one expert per group; a group's rank is the sum of its two best",
                f"use {experts // 2} or less",
            )
        if self.decoder_sparse_step > self.num_hidden_layers:
            yield Problem(
                "decoder_sparse_step",
                self.decoder_sparse_step,
                "leaves no layer with experts",
                f'use {self.num_hidden_layers} or less, or family = "llama"',
            )
        elif not any(map(self.is_sparse, range(self.num_hidden_layers))):
            yield Problem(
                "first_k_dense_replace",
                self.first_k_dense_replace,
                "with decoder_sparse_step leaves no layer with experts",
                'lower it, or use family = "llama"',
            )
        limit = self.capacity_factor or 0.0
        if k <= experts < limit * k:
            yield Problem(
                "capacity_factor",
                self.capacity_factor,
                "allows an expert more tokens than there are",
                f"use at most {experts / k:g}, or null for no limit",
            )


def layers(config: Config) -> list[LayerSpec]:
    """Return embedding, blocks and head; raise ValueError if vocab_size is "auto"."""
    return llama.layers(config, _block)


def small(config: Config, tp: Sequence[int], sizes: Mapping[str, object]) -> dict[str, object]:
    """Return few experts, of which some tokens use each, and layers of every kind."""
    experts = min(config.num_experts, 8)
    k = min(config.num_experts_per_tok, 2)
    limit = config.capacity_factor
    return llama.small(config, tp, sizes) | {
        "num_experts": experts,
        "num_experts_per_tok": k,
        "moe_intermediate_size": config.hidden_size,
        "first_k_dense_replace": min(config.first_k_dense_replace, 1),
        "decoder_sparse_step": min(config.decoder_sparse_step, 2),
        "n_group": min(config.n_group, 2),
        "topk_group": min(config.topk_group, config.n_group, 2),
        "capacity_factor": None if limit is None else min(limit, experts / k),
        # The reference is a model of transformers, which neither adds these nor moves biases.
        "router_aux_loss_coef": 0.0,
        "router_z_loss_coef": 0.0,
        "score_bias_rate": 0.0,
    }


def _block(config: Config, number: int) -> LayerSpec:
    if not config.is_sparse(number):
        return llama.dense_block(config, number)
    cost = ExpertsCost(
        config.num_experts,
        config.num_experts_per_tok,
        config.expert_size,
        config.divides_weights,
        config.n_shared_experts * config.expert_size,
    )
    block = llama.block(config, number, _experts(config), cost)
    share = config.num_experts_per_tok / config.num_experts
    active = (("mlp.experts.gate_up", share), ("mlp.experts.down", share))
    side_losses = [name for name, coefficient in config.side_losses.items() if coefficient]
    return replace(
        block,
        active=active,
        side_losses=tuple(side_losses),
        num_experts=config.num_experts,
        shares_samples=True,
    )


def _experts(config: Config) -> Iterator[ParamSpec]:
    """Yield the router, the stacked experts and the shared expert of a sparse layer."""
    experts = config.num_experts
    hidden = config.hidden_size
    inner = config.expert_size
    normal, residual = weight_inits(config)
    yield ParamSpec(
        "mlp.router.weight", (experts, hidden), (), normal, True, partial=True, role="router"
    )
    if config.score_bias:
        yield ParamSpec("mlp.router.score_bias", (experts,), (), ZEROS, False, role="balance")
    gate_up = (experts, 2, inner, hidden)
    down = (experts, hidden, inner)
    yield ParamSpec("mlp.experts.gate_up", gate_up, _EXPERTS_TP_2, normal, True, role="hidden")
    yield ParamSpec("mlp.experts.down", down, _EXPERTS_TP_2, residual, True, role="hidden")
    if config.n_shared_experts:
        yield from llama.swiglu(config, "mlp.shared", config.n_shared_experts * inner)
