"""Single wrong bits, planted in a step on one rank; the recomputation must name where.

    python -m tests.train.wrong_bits --faults 20 --clean 50 --seed 1

prints a table by mesh, ZeRO stage and kind. Bits of exponent, mantissa and sign are drawn evenly.
Each clean step has a batch of its own; `--dropout 0.1` also draws masks.
A fault counts as above the noise if it changes a bit, but for an averaged gradient: there it must
change the element by more than 8 roundings of the gradient's norm, summed over the replicas.
"""

import argparse
import random
import re
from collections import Counter
from contextlib import ExitStack
from functools import cache

import torch

from parallel3d.extras.guard.recomputation import Recomputation
from parallel3d.tensor.collectives import all_reduce
from parallel3d.tensor.context import LayerContext
from parallel3d.train.check_bits import WrongBits
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer

KINDS = ("forward", "backward", "gather", "reduce", "optimizer")
MESHES = ((2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2))
STAGES = (0, 1, 3)
BITS = {"exponent": range(23, 31), "mantissa": range(23), "sign": [31]}


def case_of(mesh, zero_stage, **more):
    return Case(mesh, zero_stage=zero_stage, **({"batch": 8, "microbatches": 2, "steps": 3} | more))


def has(kind, mesh, zero_stage):
    """Weights are gathered over dp only, and only if their masters are sharded."""
    return kind != "gather" or (mesh[1] > 1 and zero_stage > 0)


def flip(tensor, draw, bit):
    """Flip a bit of an element; return the change, and its index."""
    index = tuple(draw.randrange(size) for size in tensor.shape)
    with torch.no_grad():
        before = tensor.data[index].clone()
        changed = before.view(torch.int32) ^ (-(2**31) if bit == 31 else 1 << bit)
        tensor.data[index] = changed.view(torch.float32)
    return abs(float(before) - float(tensor.data[index])), index


class Planted:
    """A fault of a kind on this rank, in the step inside the context."""

    def __init__(self, trainer, recomputation, kind, bit, seed):
        self.trainer = trainer
        self.checked = recomputation
        self.kind = kind
        self.bit = bit
        self.draw = random.Random(seed)
        self.where = None
        self.change = 0.0
        self.until = ExitStack()
        parts = trainer.parts
        (stage,) = parts.stages.module.layers
        numbers = parts.stages.layers_of_stage[stage]
        names = [parts.layers[number].name for number in numbers]
        self.layers = list(zip(names, parts.stages.module.layers[stage], strict=True))

    def is_now(self):
        key = self.trainer.parts.stages.key
        return self.where is None and key.microbatch == self.checked._microbatch

    def hit(self, tensor, where):
        self.where = where
        self.change, _ = flip(tensor, self.draw, self.bit)

    def __enter__(self):
        getattr(self, self.kind)()
        return self

    def __exit__(self, *_):
        self.until.close()

    def forward(self):
        """The output of a layer, or of a part of it; or this rank's part of a sum over tp."""
        name, layer = self.draw.choice(self.layers)
        if self.trainer.mesh.tensor.size > 1 and self.draw.random() < 0.3:
            self.part_of_a_sum(name, layer)
            return
        module = self.draw.choice(self.parts_with_output(layer))

        def spoil(module, args, output):
            if self.is_now():
                self.hit(output, name)

        self.until.enter_context(module.register_forward_hook(spoil))

    def part_of_a_sum(self, name, layer):
        """A product before it is summed, which reaches all tp ranks."""
        rows = [m for m in layer.modules() if type(m).__name__ == "RowParallelLinear"]
        if not rows:
            name, rows = next(
                (n, [m for m in other.modules() if type(m).__name__ == "RowParallelLinear"])
                for n, other in self.layers
                if n.startswith("blocks")
            )
        note_part = LayerContext.note_part
        row = self.draw.choice(rows)
        inside = []

        def spoiled(context, part):
            if inside and self.is_now():
                self.hit(part, name)
            note_part(context, part)

        LayerContext.note_part = spoiled
        self.until.callback(setattr, LayerContext, "note_part", note_part)
        self.until.enter_context(row.register_forward_pre_hook(lambda *_: inside.append(1)))
        self.until.enter_context(row.register_forward_hook(lambda *_: inside.clear()))

    def parts_with_output(self, layer):
        """Modules that are called, and return a tensor."""
        names = ("Norm", "Linear", "GeluMLP", "Attention", "Embedding", "Block", "Head")
        modules = [m for m in layer.modules() if any(n in type(m).__name__ for n in names)]
        return modules or [layer]

    def backward(self):
        """The gradient of an output, or of a weight."""
        name, layer = self.draw.choice(self.layers)
        parameters = [p for p in layer.parameters() if p not in self.checked._shared]

        def spoiled(gradient):
            if gradient is None or not self.is_now():
                return None
            gradient = gradient.clone()
            self.hit(gradient, name)
            return gradient

        def plant(module, args, output):
            if self.is_now() and output.requires_grad:
                output.register_hook(spoiled)

        if self.draw.random() < 0.5 and parameters:
            hook = self.draw.choice(parameters).register_hook(spoiled)
        else:
            hook = self.draw.choice(self.parts_with_output(layer)).register_forward_hook(plant)
        self.until.enter_context(hook)

    def gather(self):
        """A weight, as it was gathered from the ranks that hold its shards."""
        engine = self.trainer.engine
        if self.trainer.case.zero_stage == 3:
            name, layer = self.draw.choice(self.layers)
            module, parameter = self.draw.choice(
                [(m, p) for m in layer.modules() for p in m.parameters(recurse=False)]
            )

            def spoil(module, args):
                if self.is_now():
                    self.hit(parameter, name)

            self.until.enter_context(module.register_forward_pre_hook(spoil))
            return
        own = Counter()  # the part of fp32 weights that is the master's memory
        for piece in (piece for pieces in engine.states.blocks for piece in pieces):
            own[piece.held.name, piece.start] = piece.numel
        others = [
            (h, elements)
            for h in engine.held
            for elements in [
                set(range(h.parameter.numel())).difference(
                    *(range(s, s + n) for (name, s), n in own.items() if name == h.name)
                )
            ]
            if elements
        ]
        held, elements = self.draw.choice(others)
        element = self.draw.choice(sorted(elements))
        layer = max((n for n, _ in self.layers if held.name.startswith(f"{n}.")), key=len)
        self.hit(held.parameter.data.view(-1)[element : element + 1], layer)

    def reduce(self):
        """An averaged gradient; `spoil_gradient` plants it between reduction and update."""

    def spoil_gradient(self):
        states = self.trainer.engine.states
        zero = self.trainer.engine.states._zero
        place = self.draw.choice([p for block in states._blocks for p in block])
        start = place.offset + self.draw.randrange(place.piece.numel)
        for part in zero.averaged_gradients[place.group]:
            if start < part.numel():
                self.hit(part.view(-1)[start : start + 1], place.piece.held.name)
                self.piece = place.piece.held.name, place.piece.start, place.piece.numel
                return
            start -= part.numel()

    def optimizer(self):
        """A master or a moment, as the update leaves it."""
        states = self.trainer.engine.states
        optimizer = states._zero.optimizer
        place = self.draw.choice([p for block in states._blocks for p in block])
        kind = self.draw.choice(states.kinds)

        def spoil(*_):
            master = states.masters[place.group]
            masters = [m for group in optimizer.param_groups for m in group["params"]]
            if any(m is master for m in masters):
                flat = master if kind == "master" else optimizer.state[master][kind]
                self.hit(flat.data[place.offset :][: place.piece.numel], place.piece.held.name)

        self.until.enter_context(optimizer.register_step_post_hook(spoil))


def snapshot(states):
    copies = []
    for block in range(len(states.blocks)):
        with states.opened(block) as tensors:
            copies.append([{k: t.clone() for k, t in kinds.items()} for kinds in tensors])
    return copies, states.counters()


def restore(states, saved):
    copies, counters = saved
    for block, of_block in enumerate(copies):
        with states.opened(block, write=True) as tensors:
            for kinds, values in zip(tensors, of_block, strict=True):
                for kind, tensor in kinds.items():
                    tensor.copy_(values[kind])
    states.finish_loading()
    states.set_counters(counters)


@cache
def batches_of(trainer):
    return trainer.batches()


def take_step(trainer, recomputation, step, planted=None):
    """A checked step; what the check says, or "" if nothing is wrong."""
    batches = batches_of(trainer)
    batch = batches[step % len(batches)]
    with planted or ExitStack():
        try:
            with recomputation.recording(step, len(batch)):
                trainer.executor.run(batch, step)
            if planted and planted.kind == "reduce":
                planted.spoil_gradient()
            try:
                recomputation.compare()
            except WrongBits:
                trainer.engine.step(trainer.lr, lambda _: False)
                raise
            with recomputation.updating():
                trainer.engine.step(trainer.lr)
        except WrongBits as error:
            return str(error)
    return ""


def noise_of_gradients(trainer, recomputation):
    """For each piece (parameter, start, length) the change that rounding explains."""
    noise = {}
    for name, moments in sorted(recomputation._moments.items()):
        squares = all_reduce(moments[:, 1].clone(), trainer.mesh.replicas.group)
        for segment, total in zip(recomputation._segments[name], squares.tolist(), strict=True):
            noise[name, *segment] = 8 * 2**-23 * total**0.5
    return noise


def on_rank(rank, case, kinds, faults, clean, seed):
    """For each planted fault its kind, culprit, place, noise and bit; and the check's message."""
    trainer = Trainer(case)
    recomputation = Recomputation(trainer.config, trainer.mesh, trainer.parts)
    alarms = []
    rows = []
    for step in range(clean):
        message = take_step(trainer, recomputation, step)
        alarms += [message] if message else []
    saved = snapshot(trainer.engine.states)
    draw = random.Random(seed)
    for kind in kinds:
        for number in range(faults):
            culprit = draw.randrange(case.world_size)
            part = ("exponent", "mantissa", "sign")[number % 3]
            bit = draw.choice(BITS[part])
            own_seed = draw.random()
            planted = None
            if rank == culprit:
                planted = Planted(trainer, recomputation, kind, bit, own_seed)
            message = take_step(trainer, recomputation, number, planted)
            where = planted and planted.where
            is_noise = False
            if kind == "reduce":
                noise = noise_of_gradients(trainer, recomputation)
                is_noise = bool(planted and planted.change <= noise[planted.piece])
            about = where, is_noise, recomputation._number
            every = recomputation._mesh.messages.gather_texts(repr(about if planted else None))
            rows.append((kind, part, culprit, next(a for a in every if a != "None"), message))
            restore(trainer.engine.states, saved)
    trainer.close()
    return alarms, rows


def is_named(kind, culprit, where, number, message):
    """True if the check names the rank alone, the layer or weight, and the microbatch."""
    ranks = {int(rank) for rank in re.findall(r"rank (\d+) on", message)}
    if ranks != {culprit}:
        return False
    if kind in ("reduce", "optimizer"):
        return f"of {where}" in message
    return f"layer {where}, microbatch {number}:" in message


def campaign(mesh, zero_stage, faults, clean=2, seed=0, kinds=KINDS, **more):
    """Rows (kind, part of the number, result, text); and the number of false alarms."""
    case = case_of(mesh, zero_stage, **({"steps": max(clean, 3)} | more))
    kinds = [kind for kind in kinds if has(kind, mesh, zero_stage)]
    ranks = run_locally(on_rank, case.world_size, case, kinds, faults, clean, seed, timeout=3600)
    alarms, rows = ranks[0]
    assert all(other == ranks[0] for other in ranks), "ranks disagree"
    results = []
    for kind, part, culprit, about, message in rows:
        where, is_noise, number = eval(about)
        result = "named" if is_named(kind, culprit, where, number, message) else "missed"
        assert where, (kind, part, culprit)
        if is_noise and not message:
            result = "noise"
        results.append((kind, part, result, f"rank {culprit}, {where}, {number}: {message}"))
    return results, alarms


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=12, help="of each kind, mesh and stage")
    parser.add_argument("--clean", type=int, default=20, help="steps without a fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.0)
    args = parser.parse_args()
    model = {f"{n}_pdrop": args.dropout for n in ("embd", "resid", "attn")}
    total = Counter()
    for mesh in MESHES:
        for zero_stage in STAGES:
            results, alarms = campaign(
                mesh, zero_stage, args.faults, args.clean, args.seed, model=model
            )
            table = Counter((kind, result) for kind, _, result, _ in results)
            total += Counter(result for _, _, result, _ in results)
            total["alarms"] += len(alarms)
            total["clean"] += args.clean
            print(mesh, f"zero {zero_stage}", dict(table), f"{len(alarms)} alarms", flush=True)
            for _, part, result, text in results:
                if result == "missed":
                    print("   missed", part, text[:400], flush=True)
            for alarm in alarms[:3]:
                print("   alarm", alarm, flush=True)
    print(dict(total))


if __name__ == "__main__":
    main()
