"""The mathematics of sparse models, as plain functions on tensors; knows nothing of clients, messages or methods."""
