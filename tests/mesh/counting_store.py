"""A store that counts what is asked of it; torch's groups see a store as any other."""

from collections import Counter

import torch.distributed as dist


class CountingStore(dist.Store):
    def __init__(self, store):
        super().__init__()
        self.store, self.counts = store, Counter()

    def _noted(name):
        def operation(self, *args):
            self.counts[name] += 1
            return getattr(self.store, name)(*args)

        return operation

    set, get, add, check, wait = map(_noted, ("set", "get", "add", "check", "wait"))
    compare_set, delete_key, num_keys = map(_noted, ("compare_set", "delete_key", "num_keys"))
    multi_get, multi_set, append = map(_noted, ("multi_get", "multi_set", "append"))
