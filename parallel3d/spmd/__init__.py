"""The types of a tensor-parallel program's values: replicated, partial or cut, without a rank."""
