"""Token-id files of other programs: reading in place, checking, writing."""
