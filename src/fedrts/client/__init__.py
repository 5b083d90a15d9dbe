"""The client: it carries out the server's orders on its own data and keeps nothing between rounds."""
