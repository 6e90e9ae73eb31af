"""Makes nodes refuse to keep what nobody would believe. Imports hivemind: load it with a node, not before."""

from __future__ import annotations

from hivemind.dht.crypto import DHTRecord
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import RecordValidatorBase
from hivemind.utils import MSGPackSerializer

from shoal.dht.book import Reason, RecordBook, Refused
from shoal.wire.clock import now_s

# hivemind drops a peer's whole answer for one bad entry, so an entry that ends on its way must still pass.
EXPIRY_SLACK_S = 30.0
EXPIRY_TOLERANCE_S = 0.01


class SignedRecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """Accepts signed server records under their own keys, with their own end as the entry's end.

    Without this anybody could store an old record, or nonsense, to be kept for a year, and the DHT, which prefers the
    entry that ends last, would refuse the server's own.
    """

    def __init__(self, book: RecordBook) -> None:
        self._book = book

    def validate(self, record: DHTRecord) -> bool:
        """Tell whether the entry may be stored here or come from another node; refusals are counted in the book."""
        try:
            self._check(record)
        except Refused as refused:
            self._book.rejected[refused.reason] += 1
            return False
        return True

    def _check(self, record: DHTRecord) -> None:
        try:
            subkey, value = MSGPackSerializer.loads(record.subkey), MSGPackSerializer.loads(record.value)
        except (ValueError, TypeError, KeyError) as error:
            raise Refused(Reason.MALFORMED, "the entry is not packed as hivemind packs it") from error
        past_s = now_s() - EXPIRY_SLACK_S
        server = self._book.check(
            subkey, value, past_s, lambda key: DHTID.generate(source=key).to_bytes() == record.key
        )
        if abs(server.expires_at_s - record.expiration_time) > EXPIRY_TOLERANCE_S:
            raise Refused(Reason.MALFORMED, "the entry is to be kept longer or shorter than its record lives")
