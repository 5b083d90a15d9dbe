"""Fixtures for real federations; their parts are in `federating.py`."""

from federating import folder, start  # noqa: F401
