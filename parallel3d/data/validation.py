"""The validation sets of a config: its own, and splits of its data sets."""

from parallel3d.config.data import DataConfig, PartConfig


def validation_sets(config: DataConfig) -> dict[str, PartConfig]:
    """The validation sets by name; a data set's `validation_split` is one of them.

    Its name is "validation", of part i of a mixture "mixture.i.validation".
    """
    sets: dict[str, PartConfig] = dict(config.validation)
    split = config.validation_split
    found: dict[str, PartConfig | DataConfig] = {"validation": config}
    for number, part in enumerate(config.mixture):
        found[f"mixture.{number}.validation"] = part
    for name, source in found.items():
        if split is None or source.source != "hub" or source.split == split or name in sets:
            continue
        # Takes a second to import.
        from parallel3d.data.hub import has_split

        if has_split(source.name, source.subset, split):
            keys = {key: getattr(source, key) for key in PartConfig.model_fields if key != "weight"}
            sets[name] = PartConfig(**keys | {"split": split})
    return sets
