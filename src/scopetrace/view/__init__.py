"""A trace for people: text now; pictures later."""
