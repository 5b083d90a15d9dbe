"""Helpers that tests and benchmarks share: small federations (`federations`), and what it means that engines agree (`agreement`).

`accepted` has the cases of what `fedrts.train` takes.

They need no pytest, so a method outside the package can be tried with them too:

    from fedrts.testing.federations import toy

    run = toy("my_package.mine:Mine", "cnn", rounds=5)
"""
