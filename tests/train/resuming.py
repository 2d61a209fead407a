"""Trains, copies all states out, loads them into a new engine, trains on: with what differs."""

import json
import pickle
from contextlib import nullcontext
from dataclasses import replace

import torch

from parallel3d.verify.local_ranks import run_locally
from tests.cases import Trainer

AFTER = 2  # steps; the run is saved before them


def train(trainer, first, last):
    """Loss, gradient norm and what else a step says, of steps [first, last)."""
    results = []
    for step, batch in enumerate(trainer.batches()):
        if first <= step < last:
            loss = trainer.executor.run(batch, step)
            done = trainer.engine.step(trainer.lr)
            results.append((float(loss), replace(done, norm=done.grad_norm)))
    return results


def copy_out(engine):
    """A copy of every tensor, block by block."""
    copies = []
    for index, pieces in enumerate(engine.states.blocks):
        with engine.states.opened(index) as tensors:
            assert len(tensors) == len(pieces)
            copies.append([{k: t.clone() for k, t in kinds.items()} for kinds in tensors])
    return copies


def copy_in(engine, copies):
    for index, block in enumerate(copies):
        with engine.states.opened(index, write=True) as tensors:
            for kinds, copy in zip(tensors, block, strict=True):
                for kind, tensor in kinds.items():
                    tensor.copy_(copy[kind])


def load(engine, saved):
    """All of a saved run."""
    copies, counters = saved
    copy_in(engine, copies)
    engine.states.finish_loading()
    engine.states.set_counters(json.loads(json.dumps(counters)))


def no_finish(engine, saved):
    copies, counters = saved
    copy_in(engine, copies)
    engine.states.set_counters(counters)


def no_counters(engine, saved):
    copies, _ = saved
    copy_in(engine, copies)
    engine.states.finish_loading()


def unbroken(rank, case, fault=nullcontext):
    """What the ranks save in the middle, then what they say and hold at the end."""
    with fault():
        trainer = Trainer(case)
        train(trainer, 0, case.steps - AFTER)
        saved = copy_out(trainer.engine), trainer.engine.states.counters()
        return pickle.dumps(saved), _end(trainer)


def resumed(rank, case, saved, how=load, fault=nullcontext):
    with fault():
        trainer = Trainer(case)
        how(trainer.engine, pickle.loads(saved[rank]))
        return _end(trainer)


def _end(trainer):
    steps = trainer.case.steps
    results = train(trainer, steps - AFTER, steps)
    end = copy_out(trainer.engine), trainer.engine.states.counters()
    trainer.close()
    return results, *end


def run_unbroken(case, fault=nullcontext):
    """What each rank saved in the middle, and what each said and held at the end."""
    saved, ends = zip(*run_locally(unbroken, case.world_size, case, fault), strict=True)
    return saved, ends


def run_resumed(case, saved, how=load, fault=nullcontext):
    """What each rank says and holds at the end of a run that began, anew, from what was saved."""
    return run_locally(resumed, case.world_size, case, saved, how, fault)


def differences(ends, others):
    """Which of "results", "counters" and the kinds of state differ by any bit on some rank."""
    differing = set()
    for (results, states, counters), (results2, states2, counters2) in zip(
        ends, others, strict=True
    ):
        differing |= {"results"} if results != results2 else set()
        differing |= {"counters"} if counters != counters2 else set()
        for block, block2 in zip(states, states2, strict=True):
            for piece, piece2 in zip(block, block2, strict=True):
                differing |= {k for k, t in piece.items() if not torch.equal(t, piece2[k])}
    return differing
