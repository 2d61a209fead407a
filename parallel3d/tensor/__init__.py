"""Tensor-parallel layers and their collectives; a layer knows only its group."""
