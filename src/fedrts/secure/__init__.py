"""Secure aggregation: the server learns the sum of a round's updates, but no single client's update."""
