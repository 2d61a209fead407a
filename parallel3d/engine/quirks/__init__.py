"""What DeepSpeed does wrong under a pipeline, one remedy a function (docs/deepspeed.md)."""
