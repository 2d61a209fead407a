"""A run of plain torch in this process, saved as a distributed checkpoint or like the Trainer's."""

import json

import torch

from tests.foreign.sources import BATCH, LENGTH, RATE, VOCABULARY, llama, loss_of

STEPS = 3
SEEN = ("--samples-seen", str(STEPS * BATCH))


class Run:
    """A small Llama after 3 steps of an optimizer, by default AdamW."""

    def __init__(self, *, tied=False, make=None):
        self.model = llama(tied=tied)
        weights = self.model.parameters()
        self.optimizer = make(weights) if make else adamw(weights)
        generator = torch.Generator().manual_seed(0)
        for _ in range(STEPS):
            windows = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
            loss_of(self.model(windows[:, :-1]).logits, windows).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, folder, *, whole=True):
        """Save a distributed checkpoint; with the model alone unless `whole`."""
        from torch.distributed.checkpoint import save

        entries = {"model": self.model.state_dict()}
        if whole:
            entries["optimizer"] = self.optimizer.state_dict()
        save(entries, checkpoint_id=folder, no_dist=True)

    def save_as_trainer(self, folder, **options):
        """Save the files of the Trainer's folder that are read."""
        self.model.save_pretrained(folder, **options)
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": STEPS}))


def adamw(weights):
    return torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
