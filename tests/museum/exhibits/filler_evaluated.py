"""The samples that fill up the last batch of an evaluation counted like the others."""

from typing import Any

from parallel3d.config import RunConfig
from parallel3d.data.corpus import Corpus
from parallel3d.data.evaluation_samples import held_out_samples
from parallel3d.train.evaluation import Evaluation, evaluation_corpora
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, "2021-07-14", "huggingface/accelerate#125", kind="beside")


@in_place_of(Evaluation, "__init__")
def plant(
    original: Any, self: Evaluation, config: RunConfig, *rest: Any, corpus: Corpus, **others: Any
) -> None:
    """The mean is over the samples of all batches."""
    original(self, config, *rest, corpus=corpus, **others)
    count = config.train.evaluate_samples
    length = config.data.sequence_length
    full = -(-count // self._batch) * self._batch
    sets = evaluation_corpora(corpus).items()
    self._sets = {name: held_out_samples(part, length, full) for name, part in sets}
