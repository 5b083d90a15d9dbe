"""Metrics of a server, a node or a run, for Prometheus: what is counted, under which names, and where it can be read."""
