"""Named laws of batch size and learning rate, with their sources."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PowerLaw:
    """A power law of parameters and tokens: coefficient x N^params x D^tokens."""

    coefficient: float
    params: float = 0.0
    tokens: float = 0.0

    def __call__(self, params: float, tokens: float) -> float:
        """The value for a model of `params` parameters on `tokens` tokens."""
        return float(self.coefficient * params**self.params * tokens**self.tokens)


@dataclass(frozen=True)
class HyperparameterLaw:
    """The best peak learning rate of Adam, and the best batch in tokens.

    `counts`: which parameters N is, by their names in a run's counts.
    """

    source: str
    counts: str
    learning_rate: PowerLaw
    batch_tokens: PowerLaw


LAWS = {
    # OLMo-core's ladder: lr 0.0047 (N / 108e6)^(-1/3), 160 (N / 108e6)^(2/3) sequences of 2,048
    # tokens; its N leaves out the input embedding alone.
    "olmo": HyperparameterLaw(
        "OLMo-core model_ladder.py, after Porian et al., arXiv:2406.19146",
        "with_head",
        PowerLaw(0.0047 * 108e6 ** (1 / 3), params=-1 / 3),
        PowerLaw(160 * 2048 * 108e6 ** (-2 / 3), params=2 / 3),
    ),
    "step-law": HyperparameterLaw(
        "Step Law, Li et al., arXiv:2503.04715, equation 1",
        "transformer",
        PowerLaw(1.79, params=-0.713, tokens=0.307),
        PowerLaw(0.58, tokens=0.571),
    ),
}
