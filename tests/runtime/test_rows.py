"""Request rows: the order of decodes holds exactly as long as the same requests run."""

from __future__ import annotations

import torch

from bloomery.messages import NewRequestData, ResolvedSampling
from bloomery.runtime.rows import RequestRows

NEW_REQUEST = NewRequestData((1, 2, 3), 3, ResolvedSampling(temperature=0.0), ())


def add_request(rows: RequestRows, sequence: int, block: int) -> None:
    rows.add(sequence, NEW_REQUEST)
    rows.append_blocks(sequence, (block,))


def test_the_batch_order_holds_until_a_request_joins_or_leaves() -> None:
    rows = RequestRows(3, 4, 9, torch.device("cpu"))
    for sequence in (5, 6):
        add_request(rows, sequence, block=sequence)
    first = rows.order_decodes((5, 6), (3, 7))
    assert first.step_indices == (1, 0)
    assert [row.block_tables[0] for row in first.rows] == [[6], [5]]
    assert rows.order_decodes((5, 6), (4, 8)) is first
    alone = rows.order_decodes((6,), (9,))
    assert alone.row_indices.tolist() == first.row_indices[:1].tolist()
    rows.release(6)
    add_request(rows, 7, block=7)  # takes the row that sequence 6 had
    add_request(rows, 6, block=8)
    again = rows.order_decodes((6,), (3,))
    assert [row.block_tables[0] for row in again.rows] == [[8]]
    assert again.row_indices.tolist() != first.row_indices[:1].tolist()


def test_new_blocks_reach_the_device_once() -> None:
    rows = RequestRows(3, 4, 9, torch.device("cpu"))
    add_request(rows, 5, block=2)
    rows.append_blocks(5, (7,))
    rows.upload_new_blocks()
    index = rows.by_sequence[5].index
    assert rows.block_tables[0, index].tolist() == [2, 7, 9, 9]
    assert not rows.grown_rows
    rows.append_blocks(5, (1,))
    rows.upload_new_blocks()
    assert rows.block_tables[0, index].tolist() == [2, 7, 1, 9]
    assert (rows.block_tables[0, rows.padding_row] == 9).all()
