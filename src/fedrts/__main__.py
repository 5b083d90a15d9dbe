"""`python -m fedrts`: the command line."""

from fedrts.cli import main

if __name__ == "__main__":
    main()
