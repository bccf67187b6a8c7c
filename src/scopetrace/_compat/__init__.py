"""All that uses private names of torch, which an unsupported torch is asked for on import: see `versions`."""

from scopetrace._compat import versions

versions.check()
