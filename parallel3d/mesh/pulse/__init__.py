"""The watch over ranks: a sentry beside each one, a judge for all (floor 0, no torch).

A rank that is killed, stopped or late is named within seconds, whatever the others wait for.

Each rank has a small process beside it, its sentry, which knows no torch. A thread of the rank
could not do its work: it neither outlives a rank that is killed, nor runs while the rank is
stopped, or while native code holds the interpreter's lock, which is no fault. Rank and sentry share
a page of memory (`page`): writing there what the rank does costs no system call, and what it did
last can be read when it is dead. The sentries report to the judge, which is in rank 0's: a small
message every two seconds from each rank, over a connection of its own, whatever gloo, NCCL or the
store do. The verdict comes back the same way, and a thread of each rank (`train/stopping`) ends it.
"""
