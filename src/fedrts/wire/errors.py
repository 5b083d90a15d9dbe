"""What a receiver raises on bytes it cannot accept."""

from __future__ import annotations


class WireError(ValueError):
    """Malformed bytes from a sender; the only error that decoding raises."""


class MaskMissingError(WireError):
    """A download counts on a mask that the client does not hold."""
