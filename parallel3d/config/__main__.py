"""Print docs/config.md: `python -m parallel3d.config > docs/config.md`."""

from parallel3d.config.document import config_document

print(config_document(), end="")
