"""What check_upstream.py compares: two releases of an upstream, as far as this project uses them, by their source."""
