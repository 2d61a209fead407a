"""The output projection's loss against torch's cross-entropy: all tokens at once, or some.

Shapes are drawn by hypothesis; one launch of four ranks tries them all on tp 2 and 4.
"""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from parallel3d.mesh.mesh import Mesh
from parallel3d.model import transformer_cost
from parallel3d.tensor import compiled
from parallel3d.tensor import loss as loss_module
from parallel3d.tensor.cut import even_split
from parallel3d.tensor.loss import vocab_parallel_loss
from parallel3d.tensor.vocab import VocabParallelOutput
from parallel3d.verify.local_ranks import RankFailed, run_locally
from tests.contexts import layer_context
from tests.meshes import sizes_of
from tests.tensor.test_layers import EXAMPLE, FEW, SIZES, close, give, in_type, share, tensors

pytestmark = pytest.mark.gloo

# The cross-entropy computes in fp32 whatever it is given.
TOLERANCES = {torch.float64: 2e-6, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def check_cross_entropy(s, group, tolerance):
    """Labels sit on every shard's bounds; a part is as long as its share of the vocabulary.

    The product is with rows of an identity, so that its input is the logits.
    """
    bounds = {b for n in (1, 2, 4) for i in range(n) for b in even_split(s.wide, n, i)}
    labels = torch.tensor(
        sorted({min(b, s.wide - 1) for b in bounds} | {max(b - 1, 0) for b in bounds})
    )
    (logits,) = tensors(s.seed, (len(labels), s.wide))
    for scale in (1.0, 1e4):
        whole = (logits.detach() * scale).requires_grad_()
        mine = whole.detach().clone().requires_grad_()
        weight = torch.nn.Parameter(share(torch.eye(s.wide), 0, group))
        context = layer_context(group)
        loss = vocab_parallel_loss(mine, weight, labels, vocab_size=s.wide, context=context)
        want = F.cross_entropy(whole.float(), labels, reduction="none")
        assert loss.dtype == torch.float32
        assert loss.isfinite().all()
        close(loss, want, f"loss at scale {scale}", tolerance)
        grad = torch.linspace(-1, 2, len(labels))
        loss.backward(grad)
        want.backward(grad)
        close(mine.grad, whole.grad, f"gradient at scale {scale}", tolerance)


def check_loss_in_parts(s, group, tolerance):
    """Some tokens at a time, a single one or all; with the input replicated, and split."""
    shape = s.batch, 4 * s.seq  # every group divides it
    x, w = tensors(s.seed, (*shape, s.narrow), (s.wide, s.narrow))
    generator = torch.Generator().manual_seed(s.seed)
    labels = torch.randint(s.wide, shape, generator=generator)
    grad = torch.rand(shape, generator=generator) / labels.numel()
    logits = (x @ w.t()).flatten(0, 1).float()
    want = F.cross_entropy(logits, labels.flatten(), reduction="none").view(shape)
    want.backward(grad)
    for tokens, split in ((1, False), (3, True), (labels.numel(), False), (labels.numel(), True)):
        mine = share(x.detach(), 1, group) if split else x.detach()
        mine = mine.clone().requires_grad_()
        weight = torch.nn.Parameter(share(w.detach(), 0, group).clone())
        weight.grad_dtype = max(torch.float32, w.dtype, key=lambda dtype: dtype.itemsize)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformer_cost, "LOGITS_AT_ONCE", tokens * len(weight))
            loss = vocab_parallel_loss(
                mine,
                weight,
                labels,
                vocab_size=s.wide,
                context=layer_context(group, sequence_parallel=split),
            )
            loss.backward(grad)
        assert weight.grad.dtype == weight.grad_dtype
        whole = share(x.grad, 1, group) if split else x.grad
        for what, result, of in (("loss", loss, want), ("input gradient", mine.grad, whole)):
            close(result, of, f"{what}, {tokens} tokens at a time, split {split}", tolerance)
        gradient = weight.grad.to(w.dtype)
        close(gradient, share(w.grad, 0, group), f"weight gradient, {tokens} at a time", tolerance)


def check_capped_head(s, group, tolerance):
    """With a bias and a soft-cap that bends most logits: the loss of each token, and logits."""
    shape = s.batch, 4 * s.seq
    softcap = 1.5
    context = layer_context(group, sequence_parallel=s.split)
    x, w, b = tensors(s.seed, (*shape, s.narrow), (s.wide, s.narrow), (s.wide,))
    generator = torch.Generator().manual_seed(s.seed)
    labels = torch.randint(s.wide, shape, generator=generator)
    grad = torch.rand(shape, generator=generator) / labels.numel()
    logits = softcap * torch.tanh(F.linear(x, w, b) / softcap)
    want = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    want = want.view(shape)
    want.backward(grad)
    for tokens in (3, labels.numel()):
        mine = s.part(x.detach(), group).clone().requires_grad_()
        head = VocabParallelOutput(s.wide, s.narrow, context=context, bias=True, softcap=softcap)
        give(head, weight=w, bias=b)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformer_cost, "LOGITS_AT_ONCE", tokens * len(head.weight))
            loss = head.eval()(mine, labels)
            loss.backward(grad)
        what = f"{tokens} tokens at a time"
        close(loss, want, f"loss, {what}", tolerance)
        close(head.logits(mine), share(logits, -1, group), "logits", tolerance)
        close(mine.grad, s.part(x.grad, group), f"input gradient, {what}", tolerance)
        close(head.weight.grad, share(w.grad, 0, group), f"weight gradient, {what}", tolerance)
        close(head.bias.grad, share(b.grad, 0, group), f"bias gradient, {what}", tolerance)


CHECKS = (check_cross_entropy, check_loss_in_parts, check_capped_head)


def check_on_rank(rank, examples, dtype, meshes=((1, 2, 2), (1, 1, 4)), checks=None):
    """Returns the number of checks that have passed."""
    passed = 0
    for mesh in meshes:
        grid = Mesh(**sizes_of(mesh)._asdict())
        for check, example in product(checks or CHECKS, examples):
            try:
                with in_type(dtype):
                    check(example, grid.tensor.group, TOLERANCES[dtype])
                passed += 1
            except AssertionError as error:
                message = f"{check.__name__}, tp {mesh[2]}, {example}: {error}"
                raise AssertionError(message) from None
        grid.barrier()  # a rank that is done must not leave while others still make their groups
    return passed


def check_losses(examples):
    passed = run_locally(check_on_rank, 4, examples, torch.float64, timeout=60)
    assert passed == [2 * len(CHECKS) * len(examples)] * 4


def test_losses_equal_those_of_plain_torch():
    check_losses(FEW[:2])


# The failing example is in the message: shrinking it would take minutes.
@pytest.mark.slow
@settings(max_examples=1, deadline=None, phases=[Phase.generate], database=None)
@given(examples=st.lists(SIZES, min_size=2, max_size=2, unique=True))
def test_losses_of_random_sizes_equal_those_of_plain_torch(examples):
    check_losses(examples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses_in_lower_precision(dtype):
    passed = run_locally(check_on_rank, 2, [EXAMPLE], dtype, [(1, 1, 2)], timeout=60)
    assert passed == [len(CHECKS)] * 2


def compiled_on_rank(rank, dtype):
    """The same checks with the passes over logits compiled, as graphs without kernels."""
    global layer_context
    compiled.BACKEND = "aot_eager"
    layer_context = partial(layer_context, pointwise=True)
    check_on_rank(rank, [EXAMPLE], dtype, [(1, 1, 2)])
    return compiled.counts().graphs, compiled.counts().breaks


@pytest.mark.slow  # test_functions_between_products_are_compiled_once trains with such losses
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compiled_losses_are_the_same(dtype):
    for graphs, breaks in run_locally(compiled_on_rank, 2, dtype, timeout=120):
        assert graphs > 4 and not breaks


def own_part_only(x, *args):
    """Stand for an all-reduce that is missing."""
    return x


def sabotage(rank, number):
    loss_module.all_reduce = own_part_only
    loss_module.sum_copy = own_part_only
    check_on_rank(rank, [EXAMPLE], torch.float32, [(1, 1, 2)], CHECKS[number:][:1])


@pytest.mark.parametrize("number", range(len(CHECKS)))
def test_missing_collective_is_detected(number):
    with pytest.raises(RankFailed, match="not close"):
        run_locally(sabotage, 2, number)


def confident_gradients(rank):
    """Gradients at labels that the model is ever more sure of: pairs in bf16 and in fp32."""
    group = Mesh(tp=2).tensor.group
    (logits,) = tensors(0, (64, 50))
    labels = torch.arange(64) % 50
    logits = logits.detach()
    logits[torch.arange(64), labels] += torch.linspace(0, 14, 64)
    rounded = logits.bfloat16()
    weight = torch.nn.Parameter(share(torch.eye(50).bfloat16(), 0, group))
    whole = rounded.float().requires_grad_()
    F.cross_entropy(whole, labels).backward()
    pairs = []
    for at_once in (transformer_cost.LOGITS_AT_ONCE, 64):
        transformer_cost.LOGITS_AT_ONCE = at_once
        mine = rounded.clone().requires_grad_()
        context = layer_context(group)
        loss = vocab_parallel_loss(mine, weight, labels, vocab_size=50, context=context)
        loss.mean().backward()
        pairs.append((mine.grad, whole.grad))
    return pairs


def test_confident_labels_have_gradients_in_bf16():
    for pairs in run_locally(confident_gradients, 2, timeout=60):
        for rounded, exact in pairs:
            assert rounded.dtype == torch.bfloat16
            torch.testing.assert_close(rounded.float(), exact, rtol=0.01, atol=0)
