"""Compares the offline run of Weights & Biases in a run's folder with its metrics.jsonl: the messages of the
wandb client, its reader of logs (clients up to 0.19), and what `wandb sync` uploads (clients after that).

    pip install wandb
    python tests/tools/wandb_logs.py RUN

Ends with 1 if a value differs.
"""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from wandb.proto import wandb_internal_pb2 as messages

from log_values import values_of
from wandb_server import Server

BLOCK = 32768


def by_client(path):
    """The records by the client's reader."""
    import wandb
    from wandb.sdk.internal.datastore import DataStore

    wandb._assert_is_internal_process = True
    store = DataStore()
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
        yield data


def by_description(path):
    """The records by LevelDB's description of its log."""
    data = path.read_bytes()
    assert data[:7] == struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
    at, record = 7, b""
    while at < len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        checksum, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part = data[at + 7 : at + 7 + length]
        assert checksum == zlib.crc32(bytes([kind]) + part)
        record += part
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def synced(folder):
    """The rows that `wandb sync` uploads, of a copy of a folder, and the run that it makes."""
    server = Server()
    with tempfile.TemporaryDirectory() as home:
        copy = shutil.copytree(folder, Path(home) / "wandb" / folder.name)
        hidden = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40, "HOME": home}
        command = [sys.executable, "-m", "wandb", "sync", "--yes", str(copy)]
        done = subprocess.run(command, env=os.environ | hidden, capture_output=True, text=True, cwd=home)
        assert done.returncode == 0, done
    assert len(server.runs) == 1, (server.runs, done)
    return [json.loads(server.rows[number]) for number in sorted(server.rows)], server.runs[0]


def main(run):
    (path,) = run.glob("wandb/offline-run-*/run-*.wandb")
    try:
        reader, data = "the client's DataStore", list(by_client(path))
        assert data == list(by_description(path))
    except ImportError:
        reader, data = "LevelDB's description", list(by_description(path))
    records = []
    for text in data:
        record = messages.Record()
        record.ParseFromString(text)
        records.append(record)
    kinds = [record.WhichOneof("record_type") for record in records]
    print(f"{reader}: {len(records)} records: " + ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)))
    wanted = {}
    for step, tag, value, _ in values_of(run / "metrics.jsonl"):
        wanted.setdefault(step, {})[tag] = value
    rows = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    assert [row.step.num for row in rows] == sorted(wanted)
    compare(wanted, [{"/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows])
    print(f"{len(rows)} rows have the numbers of metrics.jsonl")
    if reader != "the client's DataStore":
        rows, made = synced(path.parent)
        compare(wanted, rows)
        config = json.loads(made["config"])
        print(f"wandb sync uploads {len(rows)} rows with these numbers, to {made['project']}/{made['name']} ({made['displayName']}), with {len(config)} sections of configuration")


def compare(wanted, rows):
    """Compares rows of history with what `metrics.jsonl` has of each step."""
    assert [row["_step"] for row in rows] == sorted(wanted), [row["_step"] for row in rows]
    for row in rows:
        step = row.pop("_step")
        assert row.pop("_timestamp") > 0 and row.pop("_runtime") >= 0
        values = wanted[step]
        assert row.keys() == values.keys(), row.keys() ^ values.keys()
        for tag, value in values.items():
            assert row[tag] == value or math.isnan(row[tag]) and math.isnan(value), (step, tag)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
