"""The error of a secure sum."""

from __future__ import annotations

from fedrts.wire.errors import WireError


class SecureError(WireError):
    """An unusable message, roster or share: whoever finds it takes no further part in this attempt."""
