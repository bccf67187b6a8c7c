"""Where scopetrace meets other packages: one file each, none needed."""
