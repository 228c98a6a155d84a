"""The law of matrices of tests: the fast suite shows each value of each parameter."""

from itertools import product

from matrix import covering, slow_unless


def test_each_value_of_a_matrix_is_in_one_of_few_members() -> None:
    values = {"growth": "abcde", "shape": "xyz", "static": (False, True)}
    members = [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]
    fast = [members[place] for place in covering(members)]
    assert len(fast) == 5
    for name, own in values.items():
        assert {member[name] for member in fast} == {*own}


def test_all_but_the_named_values_are_slow() -> None:
    kept, left = slow_unless([("a", 1)], [("a", 1), ("b", 2)])
    assert kept == ("a", 1)
    assert (left.values, [mark.name for mark in left.marks]) == (("b", 2), ["slow"])
