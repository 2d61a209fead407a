"""Examples that messages give to be pasted where a block is missing."""

OPTIMIZER = {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}
OPTIMIZER_OPTION = "--optimizer.params.lr 3e-4 on the command line"
_SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
PARALLEL3D = {
    "model": {"family": "gpt"} | _SIZES,
    "data": {"sequence_length": 128},
    "train": {"steps": 100},
}
