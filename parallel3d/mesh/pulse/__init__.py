"""The watch over ranks: a sentry beside each rank, an arbiter for all (floor 0, no torch).

A rank that is killed, stopped or late is named within seconds, whatever the others wait for.

Each rank has a small process beside it, its sentry, which does not load torch. A thread of the
rank could not do this work: it does not outlive a rank that is killed, and it does not run while
the rank is stopped or while native code holds the interpreter's lock, which is no fault.

- Rank and sentry share a page of memory (`page`). Writing there what the rank does costs no
  system call, and the last entry can be read after the rank is dead.
- The sentries report to the arbiter (`arbiter`), which runs in rank 0's sentry: one small message
  every two seconds from each rank, over its own connection (`listener`), independent of gloo,
  NCCL and the store.
- The outcome returns over the same connections, and a thread of each rank (`train/ending`) ends
  the rank.
"""
