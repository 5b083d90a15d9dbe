"""The server's part of a round: which clients to ask, which replies to accept, how to aggregate, what to remember."""
