"""The key of random masks: what a draw depends on besides its place in the model."""

from dataclasses import dataclass
from hashlib import blake2b

import torch

from parallel3d.tensor.segments import Dealt


def seed_of(place: str) -> int:
    """Return the seed of a generator for a named place; other places have other ones."""
    return int.from_bytes(blake2b(place.encode(), digest_size=8).digest(), "big") >> 1


@dataclass
class RandomKey:
    """The key of dropout masks; the executor updates it before every forward and backward."""

    seed: int
    dp_coord: int = 0
    step: int = 0
    microbatch: int = 0
    dealt: Dealt | None = None
    """The tokens here of the microbatch, if a context-parallel group shares its samples."""

    def seed_generator(self, place: str, tp_rank: int, device: torch.device) -> None:
        """Seed the device's default generator for the next random operator."""
        text = f"{self.seed}/{self.dp_coord}/{self.step}/{self.microbatch}/{place}/{tp_rank}"
        seed = seed_of(text)
        # torch.manual_seed would seed the generators of all visible devices.
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.get_device_module(device).manual_seed(seed)
