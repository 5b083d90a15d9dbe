"""No command of docs/deployment.md goes untested without a reason."""

from pathlib import Path

import pytest

from documented import NOT_RUN, TESTED, commands

ROOT = Path(__file__).parents[2]


def test_every_command_of_the_page_is_run_or_excused():
    unknown = [command for command in commands() if command not in TESTED and command not in NOT_RUN]
    assert unknown == [], "tests/documented.py says of every command which test runs it, or why none does"


def test_every_command_of_the_tables_is_on_the_page():
    assert [command for command in (*TESTED, *NOT_RUN) if command not in commands()] == []
    assert TESTED.keys() & NOT_RUN.keys() == set()
    assert all(NOT_RUN.values())


@pytest.mark.parametrize("test", sorted(set(TESTED.values())))
def test_tests_of_commands_exist(test: str):
    file, _, name = test.partition("::")
    assert f"\ndef {name}(" in (ROOT / file).read_text("utf-8")


def test_commands_are_found_wherever_they_stand():
    page = """
Run `fedrts keys
revoke a --dir d`, see `fedrts keys`, `fedrts keys init … --renew` and `fedrts.site`.

```
fedrts server x.toml    # a remark
A=$(cat b) fedrts watch \\
    runs/x
```

1. In a list:

   ```sh
   $ docker compose up
   ```

```ini
[Service]
ExecStart=/opt/fedrts/bin/fedrts client --server a:1
Restart=on-failure
```
"""
    assert commands(page) == [
        "fedrts server x.toml",
        "A=$(cat b) fedrts watch runs/x",
        "docker compose up",
        "fedrts client --server a:1",
        "fedrts keys revoke a --dir d",
        "fedrts keys init … --renew",
    ]
