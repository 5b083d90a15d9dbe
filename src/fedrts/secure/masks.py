"""Keys that two clients agree on, and mask words derived from them: X25519, HKDF-SHA256, AES-256 in counter mode."""

from __future__ import annotations

import secrets

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedrts.secure.errors import SecureError
from fedrts.secure.ring import Words

_NOTHING = bytes(2**16)


def new_secret() -> bytes:
    """Return 32 random bytes: a private key of X25519, or the seed of a client's own mask."""
    return secrets.token_bytes(32)


def public(secret: bytes) -> bytes:
    """Return the public key of a private one."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agreed(secret: bytes, other: bytes) -> bytes:
    """Return the shared secret of a private key and another's public key."""
    try:
        return X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:  # a point of small order, with which everybody agrees on the same
        raise SecureError("a public key with which no secret can be agreed on") from error


def derived(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    """Derive a key for one purpose."""
    return HKDF(hashes.SHA256(), 32, salt, purpose).derive(secret)


def stream(key: bytes, words: int) -> Words:
    """Return this many pseudorandom words. Use a key for one stream only."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    found = bytearray(4 * words + 15)
    length = 4 * words
    for start in range(0, length, len(_NOTHING)):
        piece = memoryview(_NOTHING)[: min(len(_NOTHING), length - start)]
        encryptor.update_into(piece, memoryview(found)[start:])
    return np.frombuffer(found, "<u4", words).astype(np.uint32, copy=False)


def sealed(key: bytes, data: bytes, about: bytes) -> bytes:
    """Encrypt and authenticate `data`; a key seals one message only."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), data, about)


def unsealed(key: bytes, data: bytes, about: bytes) -> bytes | None:
    """Decrypt data; None if it was not sealed with this key."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), data, about)
    except InvalidTag:
        return None
