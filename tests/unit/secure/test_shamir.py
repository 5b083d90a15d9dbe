"""Secret sharing: t shares give the secret, t − 1 fit every secret."""

import itertools
import random as chance

import pytest

from fedrts.secure.shamir import PRIME, SHARE, lagrange, secret_of, shares


def test_the_field_is_one_and_holds_every_secret():
    assert 1 << 256 < PRIME < 1 << 8 * SHARE
    assert not any(PRIME % small == 0 for small in range(2, 2000))
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in chance.Random(0).sample(range(2, 10**9), 24):  # Miller and Rabin
        x = pow(base, odd, PRIME)
        assert x in (1, PRIME - 1) or any(pow(x, 2**k, PRIME) == PRIME - 1 for k in range(1, twos))


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, bytes(range(32))])
def test_any_threshold_of_the_shares_give_the_secret_back(secret):
    dealt = shares(secret, [1, 2, 4, 5, 9], 3)
    for some in itertools.combinations(dealt, 3):
        assert secret_of({place: dealt[place] for place in some}) == secret


def test_fewer_shares_fit_every_secret():
    """Through t − 1 shares and any value at 0 goes a polynomial: what is missing is a share that makes it so."""
    dealt = shares(b"a" * 32, [1, 2, 3], 3)
    other = b"b" * 32
    weights = lagrange([1, 2, 3])
    known = sum(weights[place] * int.from_bytes(dealt[place], "big") for place in (1, 2))
    third = (int.from_bytes(other, "big") - known) * pow(weights[3], -1, PRIME) % PRIME
    assert secret_of({1: dealt[1], 2: dealt[2], 3: third.to_bytes(SHARE, "big")}) == other
    assert secret_of({1: dealt[1], 2: dealt[2]}) != b"a" * 32


def test_coefficients_are_drawn_anew_from_the_whole_field():
    """Two shares of 2 tell the one coefficient: no two are alike, and they lie in every eighth of the field about as often."""
    dealt = [shares(b"a" * 32, [1, 2], 2) for _ in range(800)]
    drawn = [(int.from_bytes(one[2], "big") - int.from_bytes(one[1], "big")) % PRIME for one in dealt]
    assert len(set(drawn)) == 800
    eighths = [sum(number * 8 // PRIME == eighth for number in drawn) for eighth in range(8)]
    assert sum((count - 100) ** 2 / 100 for count in eighths) < 60  # χ² with 7 degrees of freedom: beyond 10⁻⁹


def test_a_written_out_example():
    """f(x) = s + 2x + 3x²."""
    drawn = iter([2, 3])
    dealt = shares((7).to_bytes(32, "big"), [1, 2, 3], 3, lambda below: next(drawn))
    assert [int.from_bytes(dealt[place], "big") for place in (1, 2, 3)] == [12, 23, 40]


def test_wrong_sharings_are_refused():
    for secret, places, threshold in ((b"", [1, 2], 2), (bytes(32), [1, 2], 3), (bytes(32), [1, 1], 2), (bytes(32), [0, 1], 2)):
        with pytest.raises(ValueError, match=r"secret"):
            shares(secret, places, threshold)
