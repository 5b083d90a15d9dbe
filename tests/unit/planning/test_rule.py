"""Which setting is recommended."""

from dataclasses import replace
from typing import Any

from fedrts.planning.rule import LEAST_BITS, Fitting, reason, recommended

BASE = Fitting(0.1, "int8", 8, 50, 50, 1e6, 1e4, 1e6, 1e9, None)


def made(density: float, bits: int, rounds: int) -> Fitting:
    names: dict[int, Any] = {32: "float32", 16: "float16"}
    return replace(BASE, density=density, bits=bits, rounds=rounds, value_type=names.get(bits, f"int{bits}"))


def test_rounds_come_before_bits_and_density():
    assert recommended([made(0.5, 8, 49), made(0.02, 32, 50)]) == made(0.02, 32, 50)


def test_links_come_before_bits():
    assert recommended([made(0.3, 16, 50), made(0.2, 8, 50), made(0.5, 4, 50), made(1.0, 2, 50)]) == made(0.5, 4, 50)


def test_then_density():
    assert recommended([made(0.1, 8, 50), made(0.3, 8, 50), made(0.2, 8, 50)]) == made(0.3, 8, 50)


def test_more_bits_where_the_density_can_be_no_larger():
    assert recommended([made(1.0, 4, 50), made(1.0, 8, 50), made(1.0, 32, 50), made(0.5, 32, 50)]) == made(1.0, 8, 50)
    assert recommended([made(0.2, 4, 50), made(0.2, 6, 50)]) == made(0.2, 6, 50)
    assert recommended([made(0.2, 32, 50)]) == made(0.2, 32, 50)


def test_fewer_bits_only_where_nothing_else_fits():
    assert recommended([made(0.5, 2, 50), made(0.2, 4, 40)]) == made(0.5, 2, 50)
    assert recommended([made(0.5, 2, 50), made(0.1, 6, 50)]) == made(0.1, 6, 50)


def test_the_most_rounds_where_none_has_all():
    fitting = [made(0.2, 8, 10), made(0.1, 8, 20), made(0.05, 8, 20)]
    assert recommended(fitting) == made(0.1, 8, 20)
    assert reason(made(0.1, 8, 20), fitting, 50).startswith("first 20 of 50 rounds, the most that fit")


def test_the_reason():
    fitting = [made(0.2, 8, 50), made(0.2, 32, 50), made(0.3, 4, 50)]
    few = "4 bits per value, which leaves the most bytes for links"
    assert reason(made(0.3, 4, 50), fitting, 50) == f"first all 50 rounds, then {few}, then the largest density that fits"
    assert f"2 bits per value, because {LEAST_BITS} do not fit" in reason(made(0.1, 2, 50), fitting, 50)
    eight = "8 bits per value, for which the budget is large enough"
    assert reason(fitting[0], fitting[:1], 50) == f"first all 50 rounds, then {eight}, then density 0.2"
    assert reason(fitting[0], fitting[:1], 50, type_said=True) == "first all 50 rounds, then int8 as you set it, then density 0.2"
