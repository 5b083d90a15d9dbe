"""Signatures by nodes' registered keys: ECDSA on P-256, P-384 or P-521."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

Sign = Callable[[bytes], bytes]
"""By one's own key."""

_METHOD = ec.ECDSA(hashes.SHA384())


def signer(key: ec.EllipticCurvePrivateKey) -> Sign:
    """Return the function that signs with a private key."""
    return lambda message: key.sign(message, _METHOD)


def public_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the public key (PEM) of a private key."""
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def is_signed(key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether this is the signature of a message by the owner of a public key (PEM)."""
    known = _loaded(key)
    if known is None:
        return False
    try:
        known.verify(signature, message, _METHOD)
    except InvalidSignature:
        return False
    return True


@lru_cache(4096)
def _loaded(key: bytes) -> ec.EllipticCurvePublicKey | None:
    try:
        found = serialization.load_pem_public_key(key)
    except (ValueError, UnsupportedAlgorithm):
        return None
    return found if isinstance(found, ec.EllipticCurvePublicKey) else None
