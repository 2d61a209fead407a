"""Guards against faulty hardware and lost hosts: what a run does, or keeps, twice."""
