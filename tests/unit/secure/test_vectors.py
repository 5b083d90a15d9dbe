"""The vectors of docs/wire.md, by which another program can tell whether it sums as this one does."""

import hashlib
import json
from pathlib import Path

import numpy as np

from fedrts.secure import masks, shamir
from fedrts.secure.call import Call, Invited
from fedrts.secure.participant import own_key, pair_key
from fedrts.secure.ring import Ring

PAGE = Path(__file__).parents[3] / "docs" / "wire.md"


def vectors() -> dict[str, object]:
    """All of them, computed here."""
    a, b = bytes(range(32)), bytes(range(32, 64))
    call = Call(bytes(32), 3, 1, 2, tuple(Invited(client, 5 + client, b"key %d" % client) for client in range(3)), 9)
    ring = Ring(3, 8, 3, 4)
    words = ring.encoded(np.array([-127, 0, 5]), np.array([True, False, True, True]))
    drawn = iter([2, 3])
    return {
        "call": call.encoded.hex(),
        "call_digest": call.digest.hex(),
        "public_a": masks.public(a).hex(),
        "public_b": masks.public(b).hex(),
        "mask_key_ab": pair_key(a, masks.public(b), call, 0, 2).hex(),
        "mask_words_ab": masks.stream(pair_key(b, masks.public(a), call, 2, 0), 4).tolist(),
        "own_key_of_seed_a": own_key(a, call).hex(),
        "own_words_of_seed_a": masks.stream(own_key(a, call), 4).tolist(),
        "seed_commitment_a": hashlib.sha256(a).hexdigest(),
        "shares_of_a": [share.hex() for share in shamir.shares(a, [1, 2, 3], 3, lambda below: next(drawn)).values()],
        "ring_words": words.tolist(),
        "ring_packed": ring.packed(words).hex(),
    }


def test_the_documented_vectors_are_ours():
    block = PAGE.read_text("utf-8").split("<!-- vectors of secure sums -->")[1].split("```json")[1].split("```")[0]
    assert json.loads(block) == vectors()


def test_masks_of_two_are_the_same_from_both_sides():
    found = vectors()
    call = Call.decoded(bytes.fromhex(str(found["call"])))
    a, b = bytes(range(32)), bytes(range(32, 64))
    assert pair_key(a, masks.public(b), call, 0, 2) == pair_key(b, masks.public(a), call, 2, 0)
