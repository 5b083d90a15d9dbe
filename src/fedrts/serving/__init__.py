"""Small read-only web servers: pages for a person, numbers for a program; nothing can be changed through them."""
