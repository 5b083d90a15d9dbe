"""Sparse CPU programs: read from a module, planned for a mask, and run by a C library that computes active links only."""
