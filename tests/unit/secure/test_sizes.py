"""How long messages are foreseen to be is how long they are."""

from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

import fedrts
import parties
from fedrts.secure import sizes
from fedrts.secure.ring import Ring
from parties import Party


@pytest.mark.parametrize("n", [3, 7])
def test_a_client_sends_and_is_sent_what_was_foreseen(n, monkeypatch):
    monkeypatch.setattr(parties, "KEYS", [ec.generate_private_key(ec.SECP384R1()) for _ in range(n)])
    party = Party.of(n, n)
    for step in (party.advertise, party.share, party.mask, party.endorse, party.reveal):
        step()
    sent = sum(map(len, party.seen)) / n
    assert 0 <= sizes.upload(party.ring) - sent < 4  # bytes of a signature
    survivors = party.call.message([bytes(4)] * n)
    told = (party.call.encoded, party.opener.adverts(), party.opener.deal(10), survivors, party.opener.endorsements())
    assert 32 <= sizes.download(n) - sum(map(len, told)) < 40 + 4 * n  # this call has no digest of a form


def test_a_round_s_price_is_that_of_words_keys_and_shares():
    """n = 10, 18 bits, and a counter above every link's value."""
    given: dict[str, Any] = {"model": "mlp", "data": "digits", "method": "fedrts", "density": 0.2, "wire": {"value_type": "float32"}}
    plain, secure = fedrts.cost(**given), fedrts.cost(**given, secure={"aggregation": True})
    before, after = (cost.row("measured", "inner", "has mask") for cost in (plain, secure))
    values = round((before.upload_bytes - 50) / 4)
    active = values - (secure.parameters - secure.links)
    assert after.upload_bytes == pytest.approx(sizes.upload(Ring(10, 18, values, active + 1)), abs=20)
    assert after.download_bytes - before.download_bytes == sizes.download(10)
    outer = secure.row("measured", "outer", "has mask").upload_bytes - after.upload_bytes
    assert outer == pytest.approx(0.1 * (secure.links - active) * 4 / 8, rel=0.15)  # a vote is a counter of 4 bits


def test_a_plan_counts_uploads_as_sums_have_them():
    """In 32 bits uploads are shorter by a quarter; in 8 they are longer than in the open, whatever type downloads have."""
    given: dict[str, Any] = {"model": "mlp", "data": "digits", "method": "fedrts", "density": 0.2, "rounds": 10}
    plans: dict[tuple[str, str], float] = {}
    for name, table in (("open", {}), ("secure", {"aggregation": True})):
        for value_type in ("float32", "int8"):
            plan = fedrts.plan(**given, wire={"value_type": value_type}, secure=table, budget="500MB")
            plans[name, value_type] = plan.chosen.bytes
    assert plans["secure", "float32"] < plans["open", "float32"]
    assert plans["secure", "int8"] > 1.5 * plans["open", "int8"]
    assert plans["secure", "float32"] > plans["secure", "int8"]
