"""The mathematics of sparse models, as plain functions on tensors; independent of clients, messages and methods."""
