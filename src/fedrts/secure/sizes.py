"""Largest sizes of a client's messages in a sum; signatures (ECDSA) and public keys (PEM) vary by a few bytes."""

from __future__ import annotations

from fedrts.secure.call import TAG
from fedrts.secure.ring import Ring
from fedrts.secure.shamir import SHARE

_LENGTH = 4
"""Bytes of the length before a part; and of a number."""
_KEY = 32
_SIGNATURE, _LISTING = 104, 64
"""Bytes of a signature by a registered key (P-384), and on the list of survivors."""
_BOX = 2 * SHARE + 16
_PEM = 215
_ADVERT = _LENGTH + 2 * _LENGTH + 4 * (_LENGTH + _KEY) + _LENGTH + _SIGNATURE
_HEAD = 141
"""A call without its roster: version, purpose, digests and numbers."""


def upload(ring: Ring) -> int:
    """Return the bytes that each of the ring's clients sends, in all five steps."""
    n = ring.clients
    own = TAG + 2 * _LENGTH  # what a message begins with: tag and client
    shares = (n - 1) * (2 * _LENGTH + _BOX)
    revealed = n * (_LENGTH + 2 * _LENGTH + _LENGTH + len(b"seed") + _LENGTH + SHARE)
    return TAG + _ADVERT + 4 * own + shares + _LENGTH + ring.size + _LENGTH + _LISTING + revealed


def download(clients: int) -> int:
    """Return the bytes that each of this many clients receives in addition to its order."""
    call = _HEAD + clients * (3 * _LENGTH + _PEM)
    listed = clients * 2 * _LENGTH + clients * (2 * _LENGTH + _LISTING)
    return call + 4 * TAG + clients * _ADVERT + (clients - 1) * (2 * _LENGTH + _BOX) + listed
