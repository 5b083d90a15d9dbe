"""Small read-only web servers that show pages to people and numbers to programs."""
