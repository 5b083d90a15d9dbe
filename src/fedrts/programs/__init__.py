"""A model as a program that computes its active links alone, on a CPU: read from the module, planned for a mask, run by a C library."""
