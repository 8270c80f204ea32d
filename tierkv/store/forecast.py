"""What making room would cost, worked out on copies: the same order and the same rules, and nothing leaves."""

from __future__ import annotations

from tierkv.store.base import Shrinking
from tierkv.store.catalog import Catalog
from tierkv.store.index import NONE
from tierkv.store.purge import Purger


def shrinking(catalog: Catalog, purger: Purger, wanted: int, unit_bytes: int) -> Shrinking:
    """What would leave for ``wanted`` charge of ``unit_bytes`` each; called with the store's lock held."""
    purged = purger.would_give_up(wanted)
    rows, index = catalog.would_evict(wanted - purged), catalog.index
    ends = sum(index.first_child[row] == NONE for row in rows)
    return Shrinking(sum(index.charge[row] for row in rows) * unit_bytes, len(rows), ends, purged * unit_bytes)
