"""Engines run the clients of an exchange. They know no methods, and methods know no engines."""
