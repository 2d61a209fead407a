"""Run pipeline programs: this rank's stages, the executor and its clock."""
