"""The protocol: what is opened is the survivors' sum, whoever is lost when; everything else is refused with a reason."""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest

from fedrts.secure import masks, shamir
from fedrts.secure.call import Call, Invited, check_call, joined, number, parted
from fedrts.secure.errors import SecureError
from fedrts.secure.identity import public_key, signer
from fedrts.secure.opener import Opener
from fedrts.secure.participant import KEY, SEED, Advert, Participant, own_key, pair_key
from fedrts.secure.ring import Ring
from parties import KEYS, Party


@pytest.fixture
def party():
    return Party.of


def test_the_sum_of_all_is_opened_exactly(party):
    five = party(5, 4)
    for step in (five.advertise, five.share, five.mask, five.endorse, five.reveal):
        step()
    assert five.opened() == five.summed(10, 11, 12, 13, 14)


@pytest.mark.parametrize(
    ("steps", "counted"),
    [
        ([(14,), (14,), (14,), (14,), (14,)], (10, 11, 12, 13)),
        ([(), (14,), (14,), (14,), (14,)], (10, 11, 12, 13)),
        ([(), (), (14,), (14,), (14,)], (10, 11, 12, 13)),
        ([(), (), (), (14,), (14,)], (10, 11, 12, 13, 14)),
        ([(), (), (), (), (14,)], (10, 11, 12, 13, 14)),
    ],
    ids=["before keys", "before shares", "before words", "before signing", "before revealing"],
)
def test_a_client_lost_at_any_step_costs_its_own_words_at_most(party, steps, counted):
    five = party(5, 4)
    for step, gone in zip((five.advertise, five.share, five.mask, five.endorse, five.reveal), steps, strict=True):
        step(*gone)
    assert five.opened() == five.summed(*counted)


def test_clients_lost_one_at_each_step(party):
    nine = party(9, 5)
    gone: tuple[int, ...] = ()
    for step, leaves in zip((nine.advertise, nine.share, nine.mask, nine.endorse), (10, 13, 18, 15), strict=True):
        gone = (*gone, leaves)
        step(*gone)
    nine.reveal(*gone)
    assert nine.opened() == nine.summed(11, 12, 14, 15, 16, 17)


@pytest.mark.parametrize("step", range(5))
def test_fewer_than_the_threshold_go_no_further(party, step):
    five = party(5, 4)
    steps = [five.advertise, five.share, five.mask, five.endorse, five.reveal]
    for number_, one in enumerate(steps):
        gone = (10, 13) if number_ >= step else ()
        if number_ > step:
            with pytest.raises(SecureError, match=r"3 .* where 4 are needed"):
                one(*gone)
            return
        one(*gone)
    with pytest.raises(SecureError, match="3 clients that reveal shares where 4 are needed"):
        five.opener.opened()


# -- what the server knows --------------------------------------------------------------------------------------------


def attack(five, colluding, victim):
    """The victim's words, by one who has all that the server saw and all that `colluding` nodes hold; None if they are too few."""
    call, opener = five.call, five.opener
    dealt = {call.places[client]: five.clients[client]._held[victim] for client in colluding}
    some = dict(list(dealt.items())[: call.threshold])
    seed, secret = (shamir.secret_of({place: pair[kind] for place, pair in some.items()}) for kind in (0, 1))
    if seed is None or secret is None:
        return None
    sent = next(data for data in five.seen if (parts := call.parts(data))[0] == number(victim) and len(parts) == 2)
    words = five.ring.unpacked(call.parts(sent)[1]) - masks.stream(own_key(seed, call), five.ring.words)
    for peer in opener.sharing:
        if peer != victim:
            mask = masks.stream(pair_key(secret, opener._adverts[peer].masking, call, victim, peer), five.ring.words)
            words = words - mask if victim < peer else words + mask
    return five.ring.trimmed(words)


def test_the_server_with_t_nodes_has_a_clients_words_and_with_one_fewer_has_not(party):
    five = party(5, 4)
    for step in (five.advertise, five.share, five.mask):
        step()
    victim = 12
    others = [client for client in five.clients if client != victim]
    true = five.ring.trimmed(five.words(victim))
    assert (attack(five, others, victim) == true).all()
    for some in itertools.combinations(others, 3):
        found = attack(five, some, victim)
        assert found is None or (found != true).mean() > 0.5


def test_after_the_opening_t_less_one_nodes_still_lack_the_key_of_a_client_s_masks(party):
    """The seed of its own mask is revealed then; nodes that collude keep the shares of its key, which nobody may reveal beside it."""
    five = party(5, 4)
    for step in (five.advertise, five.share, five.mask):
        step()
    held = {client: dict(one._held) for client, one in five.clients.items()}
    five.endorse()
    five.reveal()
    assert five.opened() == five.summed(10, 11, 12, 13, 14)
    victim, call = 12, five.call
    seed, key = five.opener._secret(victim, SEED, {}), five.clients[victim]._adverts[victim].masking
    sent = next(data for data in five.seen if (parts := call.parts(data))[0] == number(victim) and len(parts) == 2)
    masked = five.ring.trimmed(five.ring.unpacked(call.parts(sent)[1]) - masks.stream(own_key(seed, call), five.ring.words))
    assert (masked != five.ring.trimmed(five.words(victim))).mean() > 0.5
    others = [client for client in five.clients if client != victim]
    for count, enough in ((3, False), (4, True)):
        for some in itertools.combinations(others, count):
            found = shamir.secret_of({call.places[client]: held[client][victim][1] for client in some})
            assert (found is not None and masks.public(found) == key) is enough


def test_the_server_alone_cannot_tell_two_updates_apart(party):
    """All that it sees of a client before the opening is as uniform as chance, whatever the update is."""
    three = party(3, 2)
    three.ring = Ring(3, 20, 40_000, 60_000)
    three.__post_init__()
    three.levels = {client: np.full(40_000, three.ring.most) for client in three.clients}
    three.flags = {client: np.ones(60_000, bool) for client in three.clients}
    three.advertise()
    three.share()
    three.mask()
    for data in three.seen[-3:]:
        packed = three.call.parts(data)[1]
        observed = np.bincount(np.frombuffer(packed, np.uint8), minlength=256)
        expected = len(packed) / 256
        assert ((observed - expected) ** 2 / expected).sum() < 400  # χ² with 255 degrees of freedom: 400 is beyond 10⁻⁸
        words = three.ring.trimmed(three.ring.unpacked(packed))[: three.ring.riding]
        top = words >> np.uint32(three.ring.value_width)
        assert abs(float((top & 1).mean()) - 0.5) < 0.02
        assert abs(np.corrcoef(words[:-1], words[1:])[0, 1]) < 0.03
    plain = three.ring.packed(three.words(10))
    observed = np.bincount(np.frombuffer(plain, np.uint8), minlength=256)
    assert ((observed - len(plain) / 256) ** 2).sum() / (len(plain) / 256) > 10_000  # which the test would notice


def test_two_clients_mask_the_same_words_differently(party):
    five = party(5, 4)
    five.levels = dict.fromkeys(five.levels, five.levels[10])
    five.flags = dict.fromkeys(five.flags, five.flags[10])
    five.advertise()
    five.share()
    five.mask()
    assert len({five.call.parts(data)[1] for data in five.seen[-5:]}) == 5


def test_a_client_that_copies_another_s_key_takes_no_mask_away(party):
    """12 advertises the masking key of 10 as its own. The masks of 11 with both would cancel, and 11's words stand open with its seed."""
    three = party(3, 3)
    three.advertise()
    copied = replace(three.opener._adverts[12], masking=three.opener._adverts[10].masking)
    copied = replace(copied, signature=signer(KEYS[2])(three.call.signed(b"keys", *copied.parts)))
    three.clients[12]._adverts[12] = three.opener._adverts[12] = copied
    three.share()
    three.mask()
    three.endorse()
    three.reveal()
    places = three.opener._shares[11, SEED]
    seed = shamir.secret_of(places)
    assert seed is not None
    sent = next(data for data in three.seen if (parts := three.call.parts(data))[0] == number(11) and len(parts) == 2)
    words = three.ring.unpacked(three.call.parts(sent)[1]) - masks.stream(own_key(seed, three.call), three.ring.words)
    assert (three.ring.trimmed(words) != three.ring.trimmed(three.words(11))).mean() > 0.5


# -- what is refused --------------------------------------------------------------------------------------------------


def until_masked(party, n=5, threshold=4, **kwargs):
    found = party(n, threshold, **kwargs)
    found.advertise()
    found.share()
    found.mask()
    return found


def test_a_client_reveals_of_each_peer_one_kind_of_share_and_once(party):
    five = until_masked(party)
    survivors = five.opener.survivors()
    five.endorse()
    message = five.opener.endorsements()
    revealed = five.call.parts(five.clients[10].reveal(message))[1:]
    kinds = [(parted(part)[0], parted(part)[1]) for part in revealed]
    assert len({peer for peer, _ in kinds}) == len(kinds) == 5
    assert {kind for _, kind in kinds} == {SEED}
    assert (five.clients[10]._seed, five.clients[10]._masking, five.clients[10]._held) == (b"", b"", {})
    with pytest.raises(SecureError, match="asked twice for shares that open"):
        five.clients[10].reveal(message)
    with pytest.raises(SecureError, match="asked twice for its signature"):
        five.clients[10].endorse(survivors)


def test_the_server_takes_no_share_of_the_other_kind(party):
    five = until_masked(party)
    five.endorse()
    five.clients[10].reveal(five.opener.endorsements())
    for part in ([number(11), KEY, bytes(33)], [number(99), SEED, bytes(33)], [number(11), SEED, bytes(32)]):
        with pytest.raises(SecureError, match="reveals what it was not asked for"):
            five.opener.revealed(10, five.call.message([number(10), joined(part)]))


def test_the_server_takes_shares_of_signers_alone_and_once(party):
    five = until_masked(party)
    five.endorse(14)
    message = five.opener.endorsements()
    said = five.clients[10].reveal(message)
    five.opener.revealed(10, said)
    for client, data in ((10, said), (14, five.call.message([number(14)]))):
        with pytest.raises(SecureError, match=f"shares of client {client}, from whom none are due"):
            five.opener.revealed(client, data)


def test_a_client_lost_before_its_words_gives_its_key_and_not_its_seed(party):
    five = party(5, 4)
    five.advertise()
    five.share()
    five.mask(14)
    five.endorse(14)
    five.reveal(14)
    assert set(five.opener._shares) == {(client, SEED) for client in (10, 11, 12, 13)} | {(14, KEY)}


def test_an_opening_is_on_record_before_anything_is_revealed(party):
    notes: list[str] = []

    def noted():
        notes.append("opening")
        raise SecureError("round 3 was opened before")

    five = until_masked(party, opening=noted)
    five.endorse()
    with pytest.raises(SecureError, match="opened before"):
        five.clients[10].reveal(five.opener.endorsements())
    assert notes == ["opening"]


def test_messages_of_another_round_or_attempt_are_refused(party):
    first, second = party(5, 4), party(5, 4, attempt=1)
    first.advertise()
    second.advertise()
    with pytest.raises(SecureError, match="another round, attempt or roster"):
        second.clients[10].share(first.opener.adverts())
    with pytest.raises(SecureError, match="another round, attempt or roster"):
        second.opener.advertised(10, first.seen[0])
    body = first.seen[0][8:]  # with the other attempt's tag
    with pytest.raises(SecureError, match="not signed by its registered key for this round, attempt and roster"):
        second.opener.advertised(10, second.call.tag + body)


def forged(five, client, change):
    """All adverts, with a change to one of them."""
    adverts = {one: copy.copy(advert) for one, advert in five.opener._adverts.items()}
    adverts[client] = change(adverts[client])
    return five.call.message([advert.encoded for advert in adverts.values()])


def test_a_swapped_or_unsigned_key_is_refused(party):
    five = party(5, 4)
    five.advertise()
    other = masks.public(masks.new_secret())
    stranger = signer(KEYS[11])
    changes = [
        lambda advert: replace(advert, masking=other),
        lambda advert: replace(advert, sealing=other),
        lambda advert: replace(advert, signature=b""),
        lambda advert: replace(advert, masking=other, signature=stranger(five.call.signed(b"keys", *replace(advert, masking=other).parts))),
    ]
    for place, change in enumerate(changes):
        with pytest.raises(SecureError, match="keys of client 12 are not signed"):
            five.clients[[10, 11, 13, 14][place]].share(forged(five, 12, change))


@pytest.mark.parametrize("name", ["sealing", "masking", "listing", "seed"])
def test_an_advert_with_parts_of_another_length_is_refused(party, name):
    five = party(5, 4)
    five.clients[10].advertise()
    own = replace(five.clients[10]._adverts[10], **{name: bytes(31)})
    own = replace(own, signature=five.clients[10].sign(five.call.signed(b"keys", *own.parts)))
    with pytest.raises(SecureError, match="an advert with parts of another length"):
        five.opener.advertised(10, five.call.message([own.encoded]))


def test_a_client_whose_own_keys_were_replaced_refuses(party):
    five = party(5, 4)
    five.advertise()
    again = Participant(five.call, 12, signer(KEYS[2]), lambda: None)
    five.opener.advertised(12, again.advertise())
    with pytest.raises(SecureError, match="other keys than this client's own"):
        five.clients[12].share(five.opener.adverts())


def test_clients_that_were_called_with_different_rosters_find_out(party):
    """The one was told of a further client: the other's signature does not cover that roster."""
    five, six = party(5, 4), party(6, 4)
    five.advertise()
    six.advertise()
    own = six.clients[10]
    parts = [advert.encoded for client, advert in six.opener._adverts.items() if client != 11]
    parts.insert(1, five.opener._adverts[11].encoded)
    with pytest.raises(SecureError, match=r"keys of client 11 are not signed .* roster"):
        own.share(six.call.message(parts))


def test_a_server_that_tells_clients_of_different_keys_gets_no_opening(party):
    """Client 14 advertises two sets of keys, and each half of the others is shown another one."""
    five = party(5, 3)
    five.advertise()
    twin = Participant(five.call, 14, signer(KEYS[4]), lambda: None)
    one, other = five.opener.adverts(), None
    five.opener.advertised(14, twin.advertise())
    other = five.opener.adverts()
    boxes = {c: five.clients[c].share(one if c in (10, 11, 14) else other) for c in five.clients}
    for c, data in boxes.items():
        five.opener.shared(c, data)
    for c in (10, 11, 12, 13):
        five.opener.masked(c, five.clients[c].mask(five.opener.deal(c), five.ring, five.words(c)))
    survivors = five.opener.survivors()
    signatures = {c: five.clients[c].endorse(survivors) for c in (10, 11, 12, 13)}
    together = five.call.message([b"".join(five.call.parts(data)) for data in signatures.values()])
    for c in (10, 11, 12, 13):
        with pytest.raises(SecureError, match="has not signed the list of survivors"):
            five.clients[c].reveal(together)


def test_a_server_that_deals_shares_of_different_clients_gets_no_opening(party):
    """10 and 11 add masks with 14, and 12 and 13 do not: what all sign says with whom they share masks."""
    five = party(5, 3)
    five.advertise()
    five.share()
    boxes = five.opener._boxes
    for client in (10, 11, 12, 13):
        senders = [sender for sender in boxes if sender != client and (sender != 14 or client < 12)]
        dealt = five.call.message([number(sender) + boxes[sender][client] for sender in senders])
        five.clients[client].mask(dealt, five.ring, five.words(client))
    survivors = five.call.message(list(map(number, (10, 11, 12, 13))))
    signatures = {client: five.clients[client].endorse(survivors) for client in (10, 11, 12, 13)}
    together = five.call.message([b"".join(five.call.parts(data)) for data in signatures.values()])
    for client in (10, 11, 12, 13):
        with pytest.raises(SecureError, match="has not signed the list of survivors"):
            five.clients[client].reveal(together)


@pytest.mark.parametrize("signer_", [14, 99])
def test_signatures_of_those_who_did_not_survive_do_not_count(party, signer_):
    five = party(5, 4)
    five.advertise()
    five.share()
    five.mask(14)
    five.endorse(14)
    ghost = five.clients[14]._listing.sign(five.clients[10]._list)  # a node that colludes
    message = five.call.message([*five.call.parts(five.opener.endorsements())[:3], number(signer_) + ghost])
    with pytest.raises(SecureError, match=f"client {signer_} has not signed the list"):
        five.clients[10].reveal(message)


def test_a_forged_list_of_survivors_is_refused(party):
    five = until_masked(party)
    send = five.call.message
    for client, names, why in (
        (10, [11, 12, 13, 14], "leaves out this client"),
        (11, [10, 11, 12, 99], "one that shared nothing"),
        (12, [10, 11, 12, 12], "names a client twice"),
        (13, [10, 11, 13], "3 survivors where 4 are needed"),
    ):
        with pytest.raises(SecureError, match=why):
            five.clients[client].endorse(send(list(map(number, names))))


def test_signatures_on_another_list_open_nothing(party):
    """The server shows four clients one list and the fifth another: neither side has t signatures on its own."""
    five = until_masked(party)
    send = five.call.message
    lists = {10: [10, 11, 12, 13], 11: [10, 11, 12, 13], 12: [10, 11, 12, 13, 14], 13: [10, 11, 12, 13, 14], 14: [10, 11, 12, 13, 14]}
    signatures = {c: five.clients[c].endorse(send(list(map(number, names)))) for c, names in lists.items()}
    bodies = {c: b"".join(five.call.parts(data)) for c, data in signatures.items()}
    with pytest.raises(SecureError, match="client 10 has not signed"):
        five.clients[12].reveal(send(list(bodies.values())))
    with pytest.raises(SecureError, match="3 signatures on the same list where 4 are needed"):
        five.clients[13].reveal(send([bodies[c] for c in (12, 13, 14)]))
    with pytest.raises(SecureError, match="3 signatures on the same list where 4 are needed"):
        five.clients[14].reveal(send([bodies[c] for c in (12, 12, 13, 14)]))  # one of them twice


@pytest.mark.parametrize("kind", ["seed", "key"])
def test_one_wrong_share_is_left_out_and_too_many_are_said(party, kind):
    def wrong(five, liar, whose):
        held = list(five.clients[liar]._held[whose])
        held[kind == "key"] = bytes(32) + b"\x07"
        five.clients[liar]._held[whose] = tuple(held)

    for liars in ((11,), (11, 12)):
        five = party(5, 3)
        five.advertise()
        five.share()
        five.mask(14)
        whose = 13 if kind == "seed" else 14
        for liar in liars:
            wrong(five, liar, whose)
        five.endorse(14)
        five.reveal(14)
        if len(liars) == 1:
            assert five.opened() == five.summed(10, 11, 12, 13)
        else:
            with pytest.raises(SecureError, match=f"client {whose}'s {kind} give another one than it advertised"):
                five.opener.opened()


def test_words_of_another_length_or_client_are_refused(party):
    five = party(5, 4)
    five.advertise()
    five.share()
    sent = five.clients[10].mask(five.opener.deal(10), five.ring, five.words(10))
    own, packed = five.call.parts(sent)
    with pytest.raises(SecureError, match="bytes of masked words where"):
        five.opener.masked(10, five.call.message([own, packed[:-1]]))
    with pytest.raises(SecureError, match="a message of another client than 11"):
        five.opener.masked(11, sent)
    five.opener.masked(10, sent)
    with pytest.raises(SecureError, match="from whom none are due"):
        five.opener.masked(10, sent)


def test_a_box_opens_for_its_receiver_from_its_sender_in_its_call_alone(party):
    """Handed back, passed to another, of another attempt, or changed: it cannot be read, and nobody but its sender's share is lost."""
    five, later = party(5, 4), party(5, 4, attempt=1)
    for one in (five, later):
        one.advertise()
        one.share()
    boxes = five.opener._boxes
    wrong = {
        11: boxes[10][11],  # what 10 itself sealed for 11
        12: boxes[11][10],
        13: later.opener._boxes[13][10],
        14: boxes[14][10][:-1] + bytes([boxes[14][10][-1] ^ 1]),
    }
    five.clients[10].mask(five.call.message([number(sender) + box for sender, box in wrong.items()]), five.ring, five.words(10))
    assert {sender: five.clients[10]._held[sender] for sender in wrong} == dict.fromkeys(wrong, (b"", b""))
    five.clients[12].mask(five.opener.deal(12), five.ring, five.words(12))
    assert all(len(share) == shamir.SHARE for pair in five.clients[12]._held.values() for share in pair)
    key = masks.new_secret()
    assert masks.unsealed(key, masks.sealed(key, b"share", b"one call"), b"one call") == b"share"
    assert masks.unsealed(key, masks.sealed(key, b"share", b"one call"), b"another") is None


@pytest.mark.parametrize("senders", [(11, 11, 12, 13), (10, 11, 12, 13), (11, 12, 13, 99)], ids=["twice", "its own", "a stranger's"])
def test_shares_from_whom_none_are_due_are_refused(party, senders):
    five = party(5, 4)
    five.advertise()
    five.share()
    box = five.opener._boxes[11][10]
    with pytest.raises(SecureError, match="from whom none are due"):
        five.clients[10].mask(five.call.message([number(sender) + box for sender in senders]), five.ring, five.words(10))


def test_a_client_goes_on_with_enough_keys_and_shares_alone(party):
    """Whatever the server counts: with fewer peers its masks would be those of fewer."""
    five = party(5, 4)
    five.advertise()
    adverts = five.opener.adverts()
    with pytest.raises(SecureError, match="3 keys where 4 are needed"):
        five.clients[10].share(five.call.message(five.call.parts(adverts)[:3]))
    with pytest.raises(SecureError, match="two adverts of one client"):
        five.clients[14].share(five.call.message([*five.call.parts(adverts), five.call.parts(adverts)[0]]))
    for client in (11, 12, 13):
        five.opener.shared(client, five.clients[client].share(adverts))
    five.opener._sharing = (11, 12, 13)
    two = five.call.message([number(sender) + five.opener._boxes[sender][11] for sender in (12, 13)])
    with pytest.raises(SecureError, match="3 shares where 4 are needed"):
        five.clients[11].mask(two, five.ring, five.words(11))


def test_every_attempt_has_keys_of_its_own(party):
    """Also one that a client begins anew: nothing that was sealed or masked before opens with what is revealed later."""
    call = party(5, 4).call
    seen = [Advert.of(parted(call.parts(Participant(call, 10, signer(KEYS[0]), lambda: None).advertise())[0]), call) for _ in range(2)]
    keys = [key for advert in seen for key in (advert.sealing, advert.masking, advert.listing, advert.seed)]
    assert len(set(keys)) == 8
    other = party(5, 4, attempt=1).call
    assert own_key(bytes(32), call) != own_key(bytes(32), other)
    a, b = masks.new_secret(), masks.public(masks.new_secret())
    assert len({pair_key(a, b, one, 10, peer) for one in (call, other) for peer in (11, 12)}) == 4
    sealing = Participant(call, 10, signer(KEYS[0]), lambda: None)
    sealed: set[bytes] = set()
    for sealing.call in (call, other):
        sealed |= {sealing._sealing_key(replace(seen[0], sealing=b), *way) for way in ((10, 11), (11, 10), (10, 12))}
    assert len(sealed) == 6


def test_what_a_client_holds_is_in_no_log(party):
    """Nothing that may be printed of it has a secret or a share in it."""
    five = until_masked(party)
    one = five.clients[10]
    shown = repr(one)
    for secret in (one._seed, one._masking, one._sealing, *(share for pair in one._held.values() for share in pair)):
        assert repr(secret)[2:-1] not in shown


def test_what_comes_in_another_s_name_too_late_or_twice_does_not_count(party):
    """One message after the other that would make the opened sum another one, if the server took it."""
    five = party(5, 4)
    five.advertise(14)
    own = five.clients[14].advertise()
    with pytest.raises(SecureError, match="keys of client 14 from client 13"):
        five.opener.advertised(13, own)
    five.opener.advertised(14, own)
    five.share(14)
    head, *boxes = five.call.parts(five.clients[14].share(five.opener.adverts()))
    for some in (boxes[:-1], [*boxes, boxes[0]], [*boxes[:-1], number(14) + boxes[0][4:]]):
        with pytest.raises(SecureError, match="has not sealed one box for every peer"):
            five.opener.shared(14, five.call.message([head, *some]))
    words = five.call.message([head, five.ring.packed(five.words(14))])
    five.mask(13, 14)
    with pytest.raises(SecureError, match="words of client 14, from whom none are due"):
        five.opener.masked(14, words)  # which dealt no shares
    late = five.clients[13].mask(five.opener.deal(13), five.ring, five.words(13))
    with pytest.raises(SecureError, match="3 masked updates where 4 are needed"):
        five.opener.survivors()
    five.opener.masked(13, late)
    five.endorse(14)
    with pytest.raises(SecureError, match="from whom none are due"):
        five.opener.masked(13, late)
    said = five.clients[10].reveal(five.opener.endorsements())
    with pytest.raises(SecureError, match="reveals two shares of one secret"):
        five.opener.revealed(10, five.call.message([*five.call.parts(said), five.call.parts(said)[1]]))


def test_words_that_come_after_the_list_do_not_count(party):
    five = party(5, 4)
    five.advertise()
    five.share()
    five.mask(14)
    late = five.clients[14].mask(five.opener.deal(14), five.ring, five.words(14))
    five.endorse(14)
    with pytest.raises(SecureError, match="words of client 14, from whom none are due"):
        five.opener.masked(14, late)
    five.reveal(14)
    assert five.opened() == five.summed(10, 11, 12, 13)


def test_an_opening_is_the_same_after_it_was_kept_and_not_of_another_length(party):
    five = until_masked(party)
    five.endorse()
    saved = five.opener.saved()
    with pytest.raises(SecureError, match="a saved opening of another length"):
        Opener.restored(saved, Ring(5, 12, 41, 60))
    with pytest.raises(SecureError, match="a saved opening in another form"):
        Opener.restored(saved + joined([b"more"]), five.ring)
    five.opener = Opener.restored(saved, five.ring)
    five.reveal()
    assert five.opened() == five.summed(10, 11, 12, 13, 14)


def test_steps_in_another_order_are_refused(party):
    five = party(5, 4)
    with pytest.raises(SecureError, match="too early for shares that open"):
        five.clients[10].reveal(five.call.message([]))
    five.advertise()
    with pytest.raises(SecureError, match="twice for its keys"):
        five.clients[10].advertise()


def test_no_step_follows_a_failure(party):
    five = party(5, 4)
    five.advertise()
    adverts = five.opener.adverts()
    with pytest.raises(SecureError, match="3 keys where 4 are needed"):
        five.clients[10].share(five.call.message(five.call.parts(adverts)[:3]))
    for client in (11, 12, 13, 14):
        five.opener.shared(client, five.clients[client].share(adverts))
    with pytest.raises(SecureError, match="client 10 is asked after a failure for its masked words in round 3, attempt 0"):
        five.clients[10].mask(five.call.message([]), five.ring, five.words(10))
    with pytest.raises(SecureError, match="after a failure for its shares"):
        five.clients[10].share(adverts)


def test_a_client_is_needed_from_its_words_to_its_shares(party):
    five, needed = party(5, 4), []
    for step in (five.advertise, five.share, five.mask, five.endorse, five.reveal):
        step()
        needed.append({one.is_needed for one in five.clients.values()})
    assert needed == [{False}, {False}, {True}, {True}, {False}]


@pytest.mark.parametrize("point", [bytes(32), b"\x01" + bytes(31)])
def test_a_key_with_which_nobody_can_agree_is_refused(party, point):
    five = party(5, 4)
    five.clients[10].advertise()
    own = replace(five.clients[10]._adverts[10], masking=point)
    own = replace(own, signature=five.clients[10].sign(five.call.signed(b"keys", *own.parts)))
    with pytest.raises(SecureError, match="no secret can be agreed on"):
        five.opener.advertised(10, five.call.message([own.encoded]))


def test_whatever_bytes_come_are_refused_with_a_reason(party):
    five = until_masked(party)
    draw = np.random.default_rng(0)
    for length in (0, 3, 8, 12, 50):
        data = five.call.tag + draw.integers(0, 256, length, np.uint8).tobytes()
        for take in (five.opener.advertised, five.opener.shared, five.opener.masked, five.opener.endorsed, five.opener.revealed):
            with pytest.raises(SecureError):
                take(10, data)


def roster(n, **changes):
    found = [Invited(number_, 5, public_key(KEYS[number_])) for number_ in range(n)]
    return {"run": b"r" * 32, "round": 0, "attempt": 0, "threshold": n, "roster": tuple(found), "most_samples": 9, **changes}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"roster": roster(2)["roster"], "threshold": 2}, "a sum of 2 clients"),
        ({"threshold": 2}, "a threshold of 2 for 5 clients"),
        ({"roster": roster(4)["roster"], "threshold": 2}, "a threshold of 2 for 4 clients"),
        ({"threshold": 6}, "a threshold of 6 for 5 clients"),
        ({"roster": (*roster(4)["roster"], roster(4)["roster"][0])}, "names a client twice"),
        ({"roster": (*roster(4)["roster"], roster(4)["roster"][3])}, "names a client twice"),
        ({"roster": (*roster(4)["roster"], Invited(9, 0, b""))}, "without samples"),
        ({"most_samples": 4}, "with more than any"),
    ],
)
def test_rosters_below_the_floors_are_refused(changes, why):
    with pytest.raises(SecureError, match=why):
        Call(**{**roster(5), **changes})


def test_a_call_travels_and_its_digest_covers_everything():
    call = Call(**roster(5))
    assert Call.decoded(call.encoded) == call
    others = [
        Call(**{**roster(5), **change})
        for change in ({"run": b"s" * 32}, {"round": 1}, {"attempt": 1}, {"threshold": 4}, {"form": b"x"}, {"purpose": b"metrics"})
    ]
    others.append(Call(**{**roster(5), "roster": (Invited(0, 6, public_key(KEYS[0])), *roster(5)["roster"][1:])}))
    assert len({one.digest for one in [call, *others]}) == 8
    assert len({call.signed(b"keys", b"x"), call.signed(b"survivors", b"x"), others[0].signed(b"keys", b"x")}) == 3
    for bad in (b"", b"abc", call.encoded[:-1], joined([b"fedrts secure sum 1"])):
        with pytest.raises(SecureError):
            Call.decoded(bad)


def test_a_client_checks_the_roster_it_is_called_with():
    call, keys = Call(**roster(5)), [public_key(key) for key in KEYS]
    check_call(call, 2, 5, keys[2], None)
    check_call(call, 2, 5, keys[2], [key for place, key in enumerate(keys[:5]) if place != 2])
    for client, samples, key, pinned, why in (
        (7, 5, keys[2], None, "not on the roster"),
        (2, 6, keys[2], None, "5 samples of client 2, which has 6"),
        (2, 5, keys[3], None, "another key for client 2"),
        (2, 5, keys[2], keys[:4], "the key of client 4 is none of the peers'"),
    ):
        with pytest.raises(SecureError, match=why):
            check_call(call, client, samples, key, pinned)
