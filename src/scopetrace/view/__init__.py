"""A trace as text and as JSON."""
