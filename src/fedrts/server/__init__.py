"""The server's part of a round: whom to ask, whom to believe, what to add up, what to remember."""
