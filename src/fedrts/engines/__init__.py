"""Engines run the clients of an exchange. Engines and methods do not know each other."""
