"""The optimizers: one file each (docs/add-an-optimizer.md), as `parallel3d.model.optimizers.*`."""
