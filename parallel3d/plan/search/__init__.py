"""Search over meshes, schedules, ZeRO stages and recomputation for the fastest plan that fits."""
