"""Messages between server and clients: their fields and what each costs."""
