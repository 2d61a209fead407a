"""Facts about a config file that the classes of a run's config do not hold."""

from parallel3d import models
from parallel3d.base.section import Beyond
from parallel3d.config import auto, deepspeed_keys
from parallel3d.config.scheduler import SCHEDULERS

# Settings of the release before, with what to do without them; to be dropped in the next.
_REMOVED = {
    "parallel3d.train": {
        "check_layers": "was removed with the check of layers at the start; remove it, and run "
        "`parallel3d verify`, which compares them with one process"
    }
}

BEYOND = Beyond(
    choices={
        "parallel3d.model": (
            "family",
            lambda: {family: models.config_class(family) for family in models.families()},
        ),
        "scheduler": ("type", lambda: SCHEDULERS),
    },
    refused=_REMOVED
    | {
        section: {name: key.reason for name, key in keys.items()}
        for section, keys in deepspeed_keys.BY_SECTION.items()
    }
    | {name: key.reasons for name, key in deepspeed_keys.TOP_LEVEL.items() if key.reasons},
    autos=[rule.path for rule in auto.RULES],
)
