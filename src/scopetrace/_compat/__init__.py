"""All that uses private names of torch, checked on import: `manifest` lists the names, `versions` what differs."""

from scopetrace._compat import manifest

manifest.check()
