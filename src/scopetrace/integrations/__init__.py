"""scopetrace in other tools, a file for each: optional, and made of the public names of `scopetrace` alone."""
