"""Secure aggregation: the server learns the sum of a round's clients, and of no client its part."""
