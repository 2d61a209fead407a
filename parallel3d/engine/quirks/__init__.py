"""Remedies for faults of DeepSpeed under a pipeline, one function each (docs/deepspeed.md)."""
