"""Errors of a receiver that cannot accept some bytes."""

from __future__ import annotations


class WireError(ValueError):
    """Malformed bytes from a sender; the only error that decoding raises."""


class MaskMissingError(WireError):
    """A download assumes a mask that the client does not hold."""
