"""Signed values in the store, so that a stranger who reaches the store cannot speak for a rank.

The secret itself is never written into the store, because any client can list its keys. Ranks get the secret through
their environment, see docs/how-to/security.md. Without a secret, values are not signed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets

from lightning_async.membership.launcher_channel import attempt

# The environment variable that holds the job's secret.
SECRET = "LIGHTNING_ASYNC_SECRET"
_log = logging.getLogger(__name__)


def new_secret() -> str:
    return secrets.token_hex(32)


class Seal:
    """A signer of values with HMAC-SHA256, which rejects unsigned ones, see https://www.rfc-editor.org/rfc/rfc2104.

    A signature covers the scope and the key, so that a value cannot be moved to another key, or into another run.

    >>> seal = Seal("a secret").within("run 1")
    >>> seal.open("rank 0", seal.sign("rank 0", b"alive"))
    b'alive'
    >>> seal.open("rank 1", seal.sign("rank 0", b"alive")) is None
    True

    Args:
        secret: Secret of the job; None or "" to sign nothing and accept everything.
        scope: Scope of the keys, which differs between runs.
    """

    def __init__(self, secret: str | None = None, scope: str = "") -> None:
        # Whatever bytes the variable has: those that are no text stand in it as surrogates.
        self._secret = (secret or "").encode(errors="surrogateescape")
        self._scope = scope
        self._told: set[str] = set()

    @classmethod
    def of_job(cls) -> Seal:
        """Return a seal with the secret from the environment, if any, for this attempt at the job."""
        return cls(os.environ.get(SECRET), f"attempt {attempt()}")

    @property
    def signs(self) -> bool:
        return bool(self._secret)

    def within(self, scope: str) -> Seal:
        return Seal(self._secret.decode(), f"{self._scope}/{scope}")

    def sign(self, key: str, value: bytes) -> bytes:
        return self._signature(key, value) + b":" + value if self.signs else value

    def open(self, key: str, sealed: bytes) -> bytes | None:
        """Return the value; None, with one warning for each key, if it is not signed by this job."""
        if (value := self.read(key, sealed)) is None:
            self.ignore(key, f"is not signed with this job's secret; {SECRET} must be the same on all hosts")
        return value

    def read(self, key: str, sealed: bytes) -> bytes | None:
        """Return the value; None, without a warning, if it is not signed by this job."""
        if not self.signs:
            return sealed
        signature, _, value = sealed.partition(b":")
        return value if hmac.compare_digest(signature, self._signature(key, value)) else None

    def ignore(self, key: str, why: str) -> None:
        if key not in self._told:
            self._told.add(key)
            _log.warning("The store's value %r is ignored: it %s. A stranger may have written it.", key, why)

    def _signature(self, key: str, value: bytes) -> bytes:
        signed = f"{self._scope}\0{key}\0".encode() + value
        return hmac.new(self._secret, signed, hashlib.sha256).hexdigest().encode()
