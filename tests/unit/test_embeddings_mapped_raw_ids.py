"""Tables of raw ids that processes map, against those in a process's memory."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.world import World
from headrace.config import EmbeddingOptimizer
from headrace.embeddings.checkpoint.dynamic import load_rows, save_rows
from headrace.embeddings.checkpoint.mapped import open_mapped, write_mapped
from headrace.embeddings.dynamic.rows_cpu import HostRows
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.raw_ids import owners
from headrace.errors import UserError
from headrace.storage import local


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60, unique=True), st.integers(1, 3), st.booleans(), st.data()
)
def test_mapped_rows_are_those_that_were_saved(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], ranks: int, ordered: bool, data: st.DataObject
) -> None:
    """Saved by several ranks, whatever the order of the ids in their files; `IdMap` finds what a binary search does."""
    folder, spec = tmp_path_factory.mktemp("mapped"), DynamicSpec("t", 3)
    values = torch.randn(len(ids), 3, generator=torch.Generator().manual_seed(1))
    row_of = {id_: i for i, id_ in enumerate(ids)}
    owner = owners(np.array(ids, np.int64), ranks)
    for rank in range(ranks):
        local_ids = np.array(ids, np.int64)[owner == rank]
        local_ids = np.sort(local_ids) if ordered else local_ids
        rows = HostRows(spec, World(rank, ranks), 1)
        weight = values[torch.tensor([row_of[i] for i in local_ids.tolist()], dtype=torch.int64)]
        held = {"ids": torch.from_numpy(local_ids), "weight": weight}
        with patch.object(rows, "dump", lambda held=held: (held, {"waiting": torch.zeros(0, 3)})):
            save_rows(rows, local(folder))
    with patch("headrace.embeddings.checkpoint.mapped.PIECE_BYTES", 64):  # several pieces
        write_mapped(spec, 0, local(folder), local(folder))
    mapped = open_mapped(spec, 0, local(folder))
    loaded = HostRows(spec, World(0, 1), 1)
    load_rows(loaded, local(folder), False)
    lookup_ids = np.array(data.draw(st.lists(st.sampled_from([*ids, 5, -(2**63), 2**63 - 1]), max_size=30)), np.int64)
    once = np.ones(len(lookup_ids), np.int64)
    positions = mapped.look_up(lookup_ids, once, False)
    np.testing.assert_array_equal(positions >= 0, np.isin(lookup_ids, ids))
    expected = torch.stack(
        [values[row_of[i]] if i in row_of else torch.zeros(3) for i in lookup_ids.tolist()] or [values[:0]]
    )
    assert torch.equal(mapped.rows_at(positions), expected.view(-1, 3))
    assert torch.equal(mapped.rows_at(positions), loaded.rows_at(loaded.look_up(lookup_ids, once, False)))
    assert (len(mapped), mapped.report.rows, mapped.nbytes) == (len(ids), len(ids), 0)
    np.testing.assert_array_equal(np.sort(mapped.ids), np.sort(np.array(ids, np.int64)))


def test_mapped_rows_stay_in_the_page_cache_and_learn_nothing(tmp_path: Path) -> None:
    spec, folder = DynamicSpec("t", 16), local(tmp_path)
    rows = HostRows(spec, World(0, 1), 1)
    rows.configure_optimizer(EmbeddingOptimizer())
    ids = np.arange(20_000, dtype=np.int64) * 7919
    rows.look_up(ids, np.ones_like(ids), True)
    save_rows(rows, folder)
    write_mapped(spec, 0, folder, folder)
    mapped = open_mapped(spec, 0, folder)
    assert torch.equal(mapped.rows_at(mapped.look_up(ids, np.ones_like(ids), False)), rows.rows_at(rows._map.find(ids)))
    smaps = Path("/proc/self/smaps").read_text().split("VmFlags")
    held = [x for x in smaps if str(tmp_path) in x]
    assert len(held) == 2, "the ids and the rows are mapped"
    for mapping in held:
        kib = {line.split(":")[0]: int(line.split()[1]) for line in mapping.splitlines() if line.endswith(" kB")}
        assert kib["Rss"] > 0
        assert kib["Anonymous"] == 0, "pages of this process alone"
    with pytest.raises(RuntimeError, match="read alone"):
        mapped.look_up(ids, np.ones_like(ids), True)
    with pytest.raises(RuntimeError, match="read alone"):
        mapped.configure_optimizer(EmbeddingOptimizer())
    file = next(tmp_path.glob("t-00000.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=r"t-00000\.safetensors is damaged"):
        write_mapped(spec, 0, folder, folder)
    file.unlink()
    with pytest.raises(UserError, match=r"t-00000\.safetensors is missing"):
        write_mapped(spec, 0, folder, folder)
