"""What travels between server and clients: fields of a message and what they cost."""
