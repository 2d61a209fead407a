"""Plants exhibits one at a time into the check that verify runs, and says which it sees."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from parallel3d.base.errors import TrainingError
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.verify.case import CaseTask, RankFindings, check, checked
from parallel3d.verify.local_ranks import RanksHung
from parallel3d.verify.measure import TOLERANCE, compile_operators
from parallel3d.verify.reference import Reference, prepare, prepare_long
from parallel3d.verify.shrink import MESHES, drops_out, resuming_pair, shrink, why_not
from tests.museum import exhibits
from tests.museum.exhibit import Exhibit
from tests.museum.needs import lacking

TIMEOUT_SECONDS = 300.0
Saved = tuple[Path, dict[str, Any]]  # folder of a run's checkpoints, and its counters at the end
_OURS = "parallel3d.base.errors."
WORDS = {
    "lines": "lines of metrics",
    "start": "first weights",
    "turns": "rotary positions",
    "norms": "norms",
    "routers": "scores of routers",
    "rates": "learning rates",
    "samples": "order of samples",
    "masks": "dropout masks",
    "accumulation": "accumulation",
    "counters": "counters",
    "masters": "fp32 masters",
    "scale": "loss scale",
    "weights": "rounding of weights",
    "settings": "settings",
    "token_losses": "losses of tokens",
    "reduction": "type of the reduction",
}


@dataclass(frozen=True)
class Visit:
    """What came of planting one exhibit.

    `by` is what saw it, "" if nothing did; `relative_size` how large the largest difference was, 1
    where it is none of numbers. `not_held` says what the config lacks to hold it. `raised`: planted
    it raises, so it is not silent, and shows nothing: its patch does not fit our code any more.
    """

    name: str
    by: str = ""
    relative_size: float = 0.0
    seconds: float = 0.0
    beyond: Mapping[str, float] = field(default_factory=dict)
    not_held: str = ""
    raised: str = ""

    @property
    def seen(self) -> bool:
        """Whether any check saw the exhibit."""
        return bool(self.by)

    def to_dict(self) -> dict[str, Any]:
        """The visit as `--json` gives it."""
        kept = ("name", "seen", "by", "relative_size", "seconds")
        return {name: getattr(self, name) for name in kept}


class Hall:
    """One config in small, with its reference, in which exhibits are planted.

    Files go to `folder`. Raises ConfigError for a config that cannot be verified.
    """

    def __init__(
        self, config: RunConfig, folder: Path, meshes: Sequence[MeshSizes] = MESHES
    ) -> None:
        torch.set_num_threads(1)  # tiny products on many threads spend their time waiting
        self._config = config
        self._folder = folder
        self._meshes = [mesh for mesh in meshes if not why_not(config, mesh)]
        self._small = shrink(config, tuple(self._meshes), str(folder))
        self._drops = drops_out(config)
        self._reference: Reference | None = None
        self._right: Saved | None = None
        self._is_compiled = False

    def lacks(self, exhibit: Exhibit) -> str:
        """What the hall's config lacks of an exhibit's needs; "" if it can hold it."""
        mesh = self._mesh_of(exhibit)
        if mesh is None:
            return f"a mesh {exhibit.sizes}"
        return lacking(exhibit, self._config, self._small[mesh]) or ""

    def small(self, mesh: MeshSizes) -> CompleteConfig:
        """The small config of one of the hall's meshes."""
        self.trained()
        return self._small[mesh]

    def visit(self, name: str, mesh: MeshSizes | None = None, is_shared: bool = False) -> Visit:
        """Plant an exhibit that the config can hold, and look.

        - `mesh`: one of the hall's; by default the first that has the exhibit's axes
        - `is_shared`: with the hall's one reference, in which the exhibit is not planted
        """
        file = exhibits.load(name)
        mesh = mesh or self._mesh_of(file.EXHIBIT)
        assert mesh is not None
        saves = "save" in file.EXHIBIT.needs
        resumes = saves or "resume" in file.EXHIBIT.needs
        saved, counters = self._saved() if resumes else (None, None)
        start = time.perf_counter()
        if is_shared:
            reference = self.trained()
            small = self._small[mesh]
        else:
            small, reference = self._planted(name, mesh, "long" in file.EXHIBIT.needs)
        task = CaseTask(resumes=saved) if resumes else CaseTask(drops=self._drops)

        def found(by: str, size: float = 1.0, beyond: Mapping[str, float] | None = None) -> Visit:
            return Visit(name, by, size, time.perf_counter() - start, beyond or {})

        try:
            if saves:  # and a right run goes on from there
                task = CaseTask(resumes=self._save(self._folder / name / "saved", Planted(name))[0])
            errors, _ = checked(
                small,
                reference,
                task,
                function=None if saves else Planted(name),
                counters=counters,
                timeout=TIMEOUT_SECONDS,
            )
        except RanksHung:
            return found("hang")
        except TrainingError as error:
            last = str(error).strip().splitlines()[-1]
            # What the library itself says is no silent bug; any other error is the patch's.
            return found("error") if last.startswith(_OURS) else Visit(name, raised=last)
        beyond = errors.beyond(reference.tolerances or TOLERANCE[small.precision])
        if not beyond:
            return found("", 0.0)
        # What has no reference comes first: where samples or masks are wrong, the loss is, too.
        by = next((k for k in WORDS if k in beyond), max(beyond, key=lambda k: beyond[k]))
        words = WORDS.get(by, by.replace("_", " "))
        return found(f"resume: {words}" if resumes else words, beyond[by], beyond)

    def _planted(self, name: str, mesh: MeshSizes, long: bool) -> tuple[CompleteConfig, Reference]:
        """Return the config and reference of a library with an exhibit in it.

        The mistake is in every process, so the reference has it wherever it calls the library.
        """
        self._compile()
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        with exhibits.load(name).plant():
            if long:
                return prepare_long(self._config, mesh, folder)
            small, reference = prepare(self._config, self._meshes, folder)
        return small[mesh], reference

    def _mesh_of(self, exhibit: Exhibit) -> MeshSizes | None:
        """The exhibit's own mesh, else the first of the hall that has its axes."""
        for mesh in (m for m in (exhibit.sizes, *self._meshes) if m in self._meshes):
            if all(has > 1 or wants == 1 for has, wants in zip(mesh, exhibit.sizes, strict=True)):
                return mesh
        return None

    def trained(self) -> Reference:
        """The reference of the hall, trained once."""
        if self._reference is None:
            self._compile()
            self._small, self._reference = prepare(self._config, self._meshes, self._folder)
        return self._reference

    def _compile(self) -> None:
        """Compile the operators of the hall's config, which takes time on the first call only."""
        if not self._is_compiled:
            compile_operators(self._small[self._meshes[0]])
            self._is_compiled = True

    def _saved(self) -> Saved:
        """A run that was saved without any exhibit."""
        self._right = self._right or self._save(self._folder / "saved")
        return self._right

    def _save(self, folder: Path, function: "Planted | None" = None) -> Saved:
        mesh, _ = resuming_pair(self._meshes)
        task = CaseTask(saves=folder)
        _, counters = checked(self.small(mesh), self.trained(), task, function=function)
        return folder, counters


@dataclass(frozen=True)
class Planted:
    """`check` with an exhibit in the code of the rank that runs it."""

    name: str

    def __call__(
        self, rank: int, config: CompleteConfig, reference: Reference, task: CaseTask
    ) -> RankFindings:
        with exhibits.load(self.name).plant():
            return check(rank, config, reference, task)


def tour(
    halls: Mapping[str, Callable[[], Hall]], names: Sequence[str]
) -> Iterator[tuple[str, Visit]]:
    """Each exhibit in the first hall that can hold it: the hall's name, and what came of it."""
    made: dict[str, Hall] = {}
    for name in names:
        exhibit = exhibits.load(name).EXHIBIT
        lacks = ""
        for title, make in halls.items():
            if title not in made:
                made[title] = make()
            missing = made[title].lacks(exhibit)
            if not missing:
                yield title, made[title].visit(name)
                break
            lacks = lacks or missing
        else:
            yield "", Visit(name, not_held=lacks)
