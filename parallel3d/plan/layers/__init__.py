"""Where layers live, which of them are alike, and how many elements they have."""
