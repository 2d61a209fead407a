"""Formats of token ids that other programs wrote: files read in place, checked, and written.

Facts of the formats are those of Megatron-LM's and datatrove's writers, of OLMo-core's readers,
of llm.c's dev/data and of Arrow's columnar format.
"""
