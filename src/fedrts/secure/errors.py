"""What a secure sum is refused with."""

from __future__ import annotations

from fedrts.wire.errors import WireError


class SecureError(WireError):
    """A message, a roster or a share with which no sum is made: the one who finds it takes no further part in this attempt."""
