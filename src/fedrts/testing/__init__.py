"""Helpers shared by tests and benchmarks: small federations (`federations`) and what it means for engines to agree (`agreement`).

`accepted` has the cases of what `fedrts.train` takes.

They need no pytest, so a method outside the package can be tried with them too:

    from fedrts.testing.federations import toy

    run = toy("my_package.mine:Mine", "cnn", rounds=5)
"""
