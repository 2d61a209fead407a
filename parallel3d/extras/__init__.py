"""Everything that a run may want and training does not need; the core imports none of it."""
