"""Prometheus metrics of a server, a node or a run: their names, how they are counted, and where they are served."""
