"""Makes tests/fixtures/parquet with pyarrow: the same rows as tables of several kinds, and as rows.jsonl.

    pip install pyarrow
    python tests/tools/parquet.py

Made with pyarrow 26.
"""

import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet

OUT = Path(__file__).parent.parent / "fixtures" / "parquet"
WORDS = "river boats größer Привет 今日は 😀 it's 1250 \n \t \x00".split(" ")
KINDS = {
    "snappy": {"compression": "snappy", "row_group_size": 30},
    "gzip": {"compression": "gzip", "use_dictionary": False, "data_page_size": 500},
    "plain": {"compression": "none", "data_page_version": "2.0", "row_group_size": 7},
    "zstd": {"compression": "zstd"},
}


def rows():
    draw = random.Random(29)
    text = lambda most: " ".join(draw.choice(WORDS) for _ in range(draw.randrange(most)))
    for number in range(100):
        yield {"id": number, "text": text(30), "meta": {"title": text(4)}, "parts": [text(3)]}


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    found = list(rows())
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in found]
    (OUT / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    table = pyarrow.Table.from_pylist(found)
    for name, options in KINDS.items():
        pyarrow.parquet.write_table(table, OUT / f"{name}.parquet", **options)
    # A title without an object, one that is null, and a text that is null.
    bad = [{"text": "a", "meta": None}, {"text": None, "meta": {"title": "b"}}, {"text": "c", "meta": {"title": None}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(bad), OUT / "nulls.parquet")
