"""What a server's starter says to its supervisor, and that one to the server: a byte each. How it has ended."""

STOP = b"s"
"""End now."""
END = b"e"
"""End, with a last snapshot where any are taken."""
DRAIN = b"d"
"""The same as soon as nobody is connected any more."""
ORPHANED = b"o"
"""Who started it is gone: the same once nobody has been connected for a while."""
UNSAVED = 74
"""The exit code of a server that has ended as it was to, without the last snapshot: another one would have no more."""
