"""All that uses private names of torch; `versions` says what differs between versions of torch, and warns of others."""

from scopetrace._compat import versions as versions
