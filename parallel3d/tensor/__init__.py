"""Tensor-parallel layers and their collectives; a layer knows its group and nothing else."""
